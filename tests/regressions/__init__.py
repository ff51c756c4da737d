"""The field bugs, each by its own name: the right behaviour, and the bug itself put back.

One scenario per bug runs twice, on the cache as it is and on one given exactly the field's
mistake, where it must fail the way the field saw it fail. No component is special.
"""

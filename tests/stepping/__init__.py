"""`Cache.step`: all running requests at once.

twins       two caches that are asked the same, one request by request
"""

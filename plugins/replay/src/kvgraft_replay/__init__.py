"""`kvgraft replay`: real or synthetic traffic through the real cache, every byte checked.

workload, detect, mooncake, agentic, synthetic   arriving requests
arrivals, engine, running                        an engine without a model, on a virtual clock
fetching, hits                                   pages from STORAGE, and where prefixes were found
payload, identity                                stamps that identify a slot's content and owner
meter, timeline, replay                          measurements, and the result
errors                                           a trace that cannot be replayed
"""

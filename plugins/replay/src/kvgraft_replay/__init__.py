"""`kvgraft replay`: real or synthetic traffic through the real cache, every byte checked.

workload, detect, mooncake, agentic, synthetic   what arrives
arrivals, engine, running                        an engine without a model, on a virtual clock
fetching, hits                                   what STORAGE brings, and where prefixes were found
payload, identity                                stamps that show what a slot holds, and whose it is
meter, timeline, replay                          what is measured, and the result
errors                                           a trace that cannot be replayed
"""

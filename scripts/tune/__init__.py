"""`make tune`: finds the engine flags and gateway limits that serve the most within the SLO on this machine.

arguments.py the command line, and the sizes that keep the time on a CPU and on a GPU
checks.py    profile, model, engine and card are there
space.py     what may be changed, and to what
probe.py     one engine measured: prefill and decode rates, KV tokens, the most it serves within the SLO
decide.py    better beyond the noise? and the gateway's limits, from what was measured
clock.py     is there time for another trial?
search.py    the trials; resumable
loop.py      current profile, search, confirmation, soak
settings.py  the profile and the gateway's settings, rewritten with their comments kept, and put back
report.py    what was found, in words
"""

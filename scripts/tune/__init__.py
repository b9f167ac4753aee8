"""`make tune`: finds the engine flags and gateway limits that serve the most within the SLO on this machine.

space.py    what may be changed, and to what
probe.py    one engine measured: prefill rate, KV tokens, the most it serves within the SLO
decide.py   better beyond the noise? and the gateway's limits, from what was measured
settings.py the profile and the gateway's settings, rewritten with their comments kept, and put back
loop.py     current profile, search, confirmation, soak; resumable
"""

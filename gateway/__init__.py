"""The front door: an OpenAI-compatible HTTP gateway in front of vLLM engines.

Rooms import downwards only (tests/unit/test_rooms.py keeps it so):

1. errors, settings, protocol, sse, limits, progress, routing: no I/O, no event loop
2. metrics, logs, keys, admission, batching, replicas: state, and who may change it
3. upstream, relay: the wire to the engines
4. auth, middleware, routes, health: what a client sees
5. app, __main__: wiring
"""

__version__ = "0.1.0"

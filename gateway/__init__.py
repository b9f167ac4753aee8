"""The front door: an OpenAI-compatible HTTP gateway in front of vLLM engines.

Rooms import their own floor and those below, never in a circle (tests/unit/test_rooms.py reads this list):

1. errors, addresses, wording, settings, keys, exchange, splice, fields, protocol, sse, limits, progress, breaker,
   replica, targets, routing, merging, engine_metrics, prefixes, sharing, facts, findings, readings, advice,
   advice_engine, advice_gateway, advice_prefix, workers, openapi: values and decisions, no event loop
2. metricfiles, metrics, logs, tracing, ledger, accountbook, accounts, admission, batching, monitor, replicas, pools,
   discovery, advisor: state, and who may change it
3. control, silence, listening, server, client, calls, upstream, relay, coalescing: the wires to clients, engines and
   siblings
4. inference, auth, middleware, health, routes: what a request meets
5. app, serving, worker, supervisor, __main__: wiring, and the processes
"""

__version__ = "0.1.0"

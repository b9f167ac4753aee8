"""`make bench` and `make bench-ladder`: a plan of engine starts and measurements, run, resumed, reported.

plan.py       what is measured, from YAML (configs/bench)
workloads.py  the requests of a measurement, from a seed
engine.py     an engine (or a gateway) of our own, started for one entry of the plan
drive.py      one measurement: `vllm bench serve`, or whole answers in a closed loop
watch.py      what the engine's /metrics and the card say meanwhile
figures.py    medians, spreads, ratios
report.py     Markdown and a self-contained HTML page
runner.py     the loop over all of it; resumable
"""

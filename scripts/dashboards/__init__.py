"""Grafana's dashboards, written in Python and shipped as JSON.

`_panels` makes panels, `_board` places them, one module each holds a dashboard's content, `__main__` writes the files,
and `preview` draws them without a Grafana server.
"""

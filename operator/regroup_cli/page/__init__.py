"""The web page of `regroup ui`: jobs of a cluster or of this machine, in a browser on the same machine.

- `charts.py` and `shown.py` compute what a view contains. They are pure.
- `cache.py` bounds what open browsers cost the API server.
- `guard.py` decides who may read the page, and sets the headers.
- `sources.py` finds jobs; `server.py` answers requests; `command.py` is the command.

The page changes nothing: it answers GET only. It needs aiohttp and Jinja2, so `kubectl regroup` imports it only for `ui`.
"""

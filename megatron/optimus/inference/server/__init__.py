"""An OpenAI-compatible server: a paged cache, continuous batching over it, and the endpoints (docs/serving.md).

app.py         the endpoints: a new one is a function in ``build_app``; page.html is the page at /
protocol.py    the fields of requests, their limits, and errors; chat.py applies the chat template
scheduler.py   which requests run: the only thread that computes
engine.py      one step on all ranks; paged_cache.py: keys and values in pages
answers.py     responses and chunks of a stream; metrics.py: Prometheus
lifetime.py    port, signals, and the end

All ranks compute the same steps in the same order, so only the scheduler's thread of rank 0 may call the engine.
"""

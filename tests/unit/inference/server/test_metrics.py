"""The server's numbers as Prometheus reads them."""

from __future__ import annotations

from megatron.optimus.inference.server.metrics import Metrics


def test_counters_gauges_and_histograms() -> None:
    metrics = Metrics()
    for endpoint, status in (("/v1/completions", 200), ("/v1/completions", 200), ("/health", 503)):
        metrics.answered(endpoint, status)
    metrics.tokens(7, 1)
    metrics.tokens(0, 4)
    metrics.token_after(0.02, is_first=True)
    metrics.token_after(70.0, is_first=True)
    metrics.token_after(0.005, is_first=False)
    metrics.step(0.3, 12)
    metrics.finished("stop", 2.0)
    text = metrics.text(running=1, waiting=2, pages=3, all_pages=40)
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    expected = {
        'optimus_http_requests_total{endpoint="/v1/completions",status="200"}': 2,
        'optimus_http_requests_total{endpoint="/health",status="503"}': 1,
        'optimus_completions_total{reason="stop"}': 1,
        "optimus_prompt_tokens_total": 7,
        "optimus_generated_tokens_total": 5,
        "optimus_step_tokens_total": 12,
        "optimus_requests_running": 1,
        "optimus_requests_waiting": 2,
        "optimus_cache_pages_used": 3,
        "optimus_cache_pages": 40,
        # Counts below a limit hold those below the limits before it, and the limit itself.
        'optimus_time_to_first_token_seconds_bucket{le="0.01"}': 0,
        'optimus_time_to_first_token_seconds_bucket{le="0.025"}': 1,
        'optimus_time_to_first_token_seconds_bucket{le="60.0"}': 1,
        'optimus_time_to_first_token_seconds_bucket{le="+Inf"}': 2,
        "optimus_time_to_first_token_seconds_count": 2,
        "optimus_time_to_first_token_seconds_sum": 70.02,
        'optimus_time_per_output_token_seconds_bucket{le="0.005"}': 1,
        "optimus_step_seconds_sum": 0.3,
        "optimus_request_seconds_count": 1,
    }
    assert {name: float(values[name]) for name in expected} == expected
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names)) == text.count("# HELP") == 13 and text.endswith("\n")

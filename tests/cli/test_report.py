"""The lines that say what a budget means and what a reply cost, word for word."""

from dataclasses import replace

import pytest

from jitllm.cli.report import as_object, format_time, lines_after, lines_before
from jitllm.reports import DeviceReport, PartReport
from tests.cli.fake_engine import FakeEngine


def finished_report():
    reply = FakeEngine().generate("a b c d")
    list(reply)
    return reply.report


def test_a_budget_below_the_weights_says_by_how_much():
    assert lines_before(FakeEngine().memory_report()) == [
        "memory   budget 400.0 KiB, weights 500.0 KiB, KV 64.0 KiB for 128 tokens,"
        " 380.0 KiB left for pages  ★ OVER BUDGET by 100.0 KiB",
        "pages    3 of 5 host blocks resident at once, 90.0 KiB each, 3 page-ins per token",
        "kernels  fake, 2 threads",
    ]


def test_a_budget_that_holds_the_model_has_no_star_and_an_automatic_one_says_so():
    memory = replace(FakeEngine().memory_report(), automatic=True, over_bytes=0)
    assert lines_before(memory)[0] == (
        "memory   budget 400.0 KiB (automatic), weights 500.0 KiB, KV 64.0 KiB for 128 tokens,"
        " 380.0 KiB left for pages"
    )


def test_a_profile_is_named_with_its_hash():
    memory = replace(FakeEngine().memory_report(), profile="mine.yaml", profile_hash="0123")
    assert lines_before(memory)[3] == "profile  mine.yaml, hash 0123"


def test_a_reply_is_followed_by_pages_bytes_rates_and_the_peak():
    assert lines_after(finished_report()) == [
        "pages    2 frames, 12 page-ins, 2 evictions, 40.0 KiB read in 7 requests,"
        " blocked on reads for 12.5 ms",
        "bytes    10.0 KiB read per token",
        "rate     prompt 4 tokens in 500.0 ms (8.0 tokens/s),"
        " decode 4 tokens in 1.00 s (4.0 tokens/s)",
        "peak     2.0 MiB RSS, 300.0 KiB of it weights",
    ]


def test_tokens_that_were_in_the_cache_are_counted_apart():
    line = lines_after(replace(finished_report(), cached_tokens=3))[2]
    assert line.startswith("rate     prompt 4 tokens (3 of them cached) in 500.0 ms")


def test_what_other_devices_did_is_a_line_each():
    host = DeviceReport("host", 3, 48, 300 * 1024, 64 * 1024, 0, seconds=0.5)
    other = DeviceReport("cpu:1", 1, 16, 0, 32 * 1024, 90 * 1024, seconds=0.0125)
    assert lines_after(replace(finished_report(), devices=[host]))[4:] == []
    report = replace(finished_report(), devices=[host, other], seams_per_token=2.0)
    assert lines_after(report)[4:] == [
        "device   host: 3 blocks, 48 block runs in 500.0 ms, 300.0 KiB resident, 64.0 KiB KV",
        "device   cpu:1: 1 block, 16 block runs in 12.5 ms, 0 B resident, 90.0 KiB streamed,"
        " 32.0 KiB KV",
        "seams    2.0 per token",
    ]


def test_the_object_for_scripts_has_every_promised_figure():
    facts = as_object(FakeEngine().memory_report(), finished_report(), "a b c dd c b a")
    assert facts["text"] == "a b c dd c b a"
    assert facts["reply"] == "d c b a"
    assert facts["ids"] == [100, 101, 102, 103]
    promised = {
        "prompt_tokens": 4,
        "decode_tokens_per_second": 4.0,
        "prefill_tokens_per_second": 8.0,
        "page_ins": 12,
        "evictions": 2,
        "bytes_read": 40960,
        "bytes_read_per_token": 10240,
        "budget_bytes": 409600,
        "resident_bytes": 307200,
        "peak_rss_bytes": 2097152,
    }
    assert {name: facts[name] for name in promised} == promised


def test_what_is_placed_where_is_a_line_each_and_what_did_not_fit_has_a_star():
    parts = (
        PartReport("blocks 0-2", "host", "paged", "cpu:1 lacks 90.0 KiB"),
        PartReport("blocks 3-4", "cpu:1", "resident", ""),
    )
    memory = replace(
        FakeEngine().memory_report(), placement=parts, n_asked_blocks=5, n_device_blocks=2
    )
    assert lines_before(memory)[3:] == [
        "placed   blocks 0-2 on host, paged  ★ cpu:1 lacks 90.0 KiB",
        "placed   blocks 3-4 on cpu:1, resident",
        "placed   2 of the 5 blocks asked for on devices",
    ]


def test_the_object_says_where_the_reply_ran_in_milliseconds():
    report = replace(finished_report(), last_pass={"host": 3, "cuda:0": 1, "cpu:1": 1})
    assert as_object(FakeEngine().memory_report(), report, "")["jitllm"] == {
        "device_blocks": 2,
        "host_blocks": 3,
        "device_ids": ["cpu:1", "cuda:0"],
        "page_ins": 12,
        "bytes_read": 40960,
        "read_wait_ms": 12.5,
        "budget_bytes": 409600,
        "prefill_ms": 500.0,
        "decode_ms": 1000.0,
        "decode_tokens_per_second": 4.0,
    }


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 us"),
        (84e-5, "840 us"),
        (0.0125, "12.5 ms"),
        (3.417, "3.42 s"),
        (125.2, "2 min 5 s"),
    ],
)
def test_times_come_in_the_unit_that_reads_best(seconds, text):
    assert format_time(seconds) == text

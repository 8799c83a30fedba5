from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mambapool.client.replay import trace
from mambapool.client.replay.request import Request
from mambapool.pool.errors import TraceError

SHIPPED = Path(__file__).parents[3] / "bench/traces/mooncake_conversation_trace.jsonl.gz"
AZURE = SHIPPED.with_name("azure_llm_2023_conv_first_2000.csv")
WriteTrace = Callable[..., Path]


def line(**changes: object) -> str:
    fields = {"timestamp": 0, "input_length": 10, "output_length": 5, "hash_ids": [0, 1], **changes}
    return json.dumps({key: value for key, value in fields.items() if value is not ...})


def test_the_shipped_trace_is_whole() -> None:
    requests = trace.load(SHIPPED)
    assert len(requests) == 12_031
    assert [request.index for request in requests] == list(range(12_031))
    assert requests[0] == Request(0, 0.0, 6758, 500, tuple(range(14)))
    assert requests[-1].arrival_ms == 3_536_999
    assert sum(request.output_length for request in requests) == 4_122_048


def test_a_line_without_an_end_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "endless.jsonl"
    path.write_text(f"{line()}\n{line()}\n")
    os.truncate(path, 2**40)  # a hole of zeros, which takes no room
    with pytest.raises(TraceError, match=f"endless.jsonl, line 3: it has more than {trace.MAX_LINE_BYTES} bytes"):
        trace.load(path)
    assert len(trace.load(path, limit=2)) == 2


def test_a_line_of_the_greatest_length_is_read(write_trace: WriteTrace) -> None:
    longest = line().ljust(trace.MAX_LINE_BYTES - 1)
    assert len(trace.load(write_trace(f"{longest}\n{longest}\n"))) == 2
    with pytest.raises(TraceError, match="line 2: it has more than"):
        trace.load(write_trace(f"{line()}\n{longest} \n"))


def test_a_limit_takes_the_first_requests_and_reads_no_further(write_trace: WriteTrace) -> None:
    path = write_trace(f"{line(output_length=7)}\n{line(output_length=8)}\nnot JSON\n")
    assert [request.output_length for request in trace.load(path, limit=2)] == [7, 8]


def test_compression_is_seen_in_the_content_and_not_in_the_name(write_trace: WriteTrace) -> None:
    content = f"{line()}\n".encode()
    named_so = write_trace(gzip.compress(content), "a.jsonl.gz")
    not_named_so = write_trace(gzip.compress(content), "b.jsonl")
    plain = write_trace(content, "c.jsonl.gz")
    assert trace.load(named_so) == trace.load(not_named_so) == trace.load(plain)


def test_requests_come_in_order_of_arrival_and_are_numbered_so(write_trace: WriteTrace) -> None:
    arrivals = (20, 10, 10.5, 10)
    lines = (line(timestamp=ms, output_length=n) for n, ms in enumerate(arrivals))
    requests = trace.load(write_trace("\n".join(lines)))
    assert [(r.index, r.arrival_ms, r.output_length) for r in requests] == [
        (0, 10.0, 1),
        (1, 10.0, 3),
        (2, 10.5, 2),
        (3, 20.0, 0),
    ]


def test_empty_lines_are_passed_over(write_trace: WriteTrace) -> None:
    assert len(trace.load(write_trace(f"\n{line()}\r\n  \n{line()}\n\n"))) == 2


def test_a_request_without_output_runs_one_step(write_trace: WriteTrace) -> None:
    (request,) = trace.load(write_trace(line(output_length=0)))
    assert request.steps == 1


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        ("{", "not JSON"),
        ("[1, 2]", "not an object"),
        ("null", "not an object"),
        ("[" * 100_000, "not JSON"),
        (line(timestamp=...), "timestamp is missing"),
        (line(timestamp="0"), 'timestamp is "0": expected milliseconds'),
        (line(timestamp=-1), "timestamp is -1"),
        (line(timestamp=float("nan")), "timestamp is NaN"),
        (line(timestamp=True), "timestamp is true"),
        (line(timestamp=10**400), "timestamp is 1000"),
        (line(input_length=1.5), "input_length is 1.5: expected a whole number"),
        (line(output_length=2**31), "output_length is 2147483648"),
        (line(output_length=None), "output_length is null"),
        (line(hash_ids=3), "hash_ids is 3: expected a list"),
        (line(hash_ids=[0, "x"]), 'an item of hash_ids is "x"'),
        (line(hash_ids=[2**63]), "an item of hash_ids is 9223372036854775808"),
        ('{"timestamp": ' + "9" * 5000 + "}", "not JSON"),
    ],
)
def test_a_broken_line_is_named_with_what_was_expected(write_trace: WriteTrace, broken: str, told: str) -> None:
    path = write_trace(f"{line()}\n{broken}\n{line()}\n")
    with pytest.raises(TraceError) as raised:
        trace.load(path)
    text = str(raised.value)
    assert text.startswith(f"{path}, line 2: ")
    assert told in text
    assert "expected" in text
    assert len(text) < len(str(path)) + 300


def test_bytes_that_are_no_text_are_named_with_their_line(write_trace: WriteTrace) -> None:
    path = write_trace(line().encode() + b"\n\xff\xfe\n")
    with pytest.raises(TraceError, match=r"line 2: .*expected UTF-8"):
        trace.load(path)


@pytest.mark.parametrize("kept", [0.5, 0.99])
def test_a_truncated_archive_is_refused(write_trace: WriteTrace, kept: float) -> None:
    whole = gzip.compress("\n".join(line(timestamp=ms) for ms in range(5000)).encode())
    path = write_trace(whole[: int(len(whole) * kept)], "cut.jsonl.gz")
    with pytest.raises(TraceError, match=r"cut\.jsonl\.gz: cannot be read: "):
        trace.load(path)


def test_a_damaged_archive_is_refused(write_trace: WriteTrace) -> None:
    whole = bytearray(gzip.compress("\n".join(line(timestamp=ms) for ms in range(5000)).encode()))
    whole[len(whole) // 2] ^= 0xFF
    path = write_trace(bytes(whole), "bad.jsonl.gz")
    with pytest.raises(TraceError, match=r"bad\.jsonl\.gz"):
        trace.load(path)


@pytest.mark.parametrize("content", ["", "\n\n", gzip.compress(b"", mtime=0)])
def test_a_trace_without_requests_is_refused(write_trace: WriteTrace, content: str | bytes) -> None:
    with pytest.raises(TraceError, match="holds no requests"):
        trace.load(write_trace(content))


@pytest.mark.parametrize("name", ["trace", "trace.txt", "trace.gz", ".gz", "trace.jsonl.zip"])
def test_an_unknown_kind_of_trace_is_refused_with_the_known_ones(write_trace: WriteTrace, name: str) -> None:
    with pytest.raises(TraceError, match=r"expected a name that ends in \.jsonl \(Mooncake\)"):
        trace.load(write_trace("a" + line(), name))


def test_a_name_that_says_nothing_leaves_it_to_the_content(write_trace: WriteTrace) -> None:
    assert len(trace.load(write_trace(line(), "requests"))) == 1
    assert len(trace.load(write_trace(gzip.compress(f"\n{line()}".encode()), "requests.txt"))) == 1
    assert len(trace.load(write_trace(azure("2023-11-16 18:15:46.6805900,374,44"), "requests.data"))) == 1


def azure(*lines: str) -> str:
    return "\r\n".join(("TIMESTAMP,ContextTokens,GeneratedTokens", *lines))


def test_an_azure_trace_starts_with_its_first_request(write_trace: WriteTrace) -> None:
    path = write_trace(
        azure("2023-11-16 18:15:50.9951690,396,109", "", "2023-11-16 18:15:46.6805900,374,0"), "trace.csv"
    )
    first, second = trace.load(path)
    assert first == Request(0, 0.0, 374, 0)
    assert second == Request(1, 4314.579, 396, 109)
    assert first.steps == 1


def test_times_of_an_azure_trace_may_have_an_offset_as_those_of_2024_have(write_trace: WriteTrace) -> None:
    lines = ("2024-05-10 00:00:00.009930+00:00,1,2", "2024-05-10 02:00:01+02:00,1,2")
    requests = trace.load(write_trace(azure(*lines), "trace.csv"))
    assert [request.arrival_ms for request in requests] == [0.0, 990.07]


def test_the_shipped_excerpt_of_azures_trace_is_whole() -> None:
    requests = trace.load(AZURE)
    assert len(requests) == 2000
    assert requests[0] == Request(0, 0.0, 374, 44)
    assert requests[-1] == Request(1999, 424_259.457, 424, 96)
    assert sum(request.output_length for request in requests) == 529_807


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        ("2023-11-16 18:15:46,374", "has 2 fields: expected TIMESTAMP,ContextTokens,GeneratedTokens"),
        ("2023-11-16 18:15:46,374,44,1", "has 4 fields"),
        ("yesterday,374,44", "TIMESTAMP is 'yesterday': expected"),
        (",374,44", "TIMESTAMP is ''"),
        ("2023-13-16 18:15:46,374,44", "TIMESTAMP is '2023-13-16 18:15:46'"),
        ("2023-11-16 18:15:46,-1,44", "ContextTokens is '-1': expected a whole number"),
        ("2023-11-16 18:15:46,374,4.5", "GeneratedTokens is '4.5'"),
        ("2023-11-16 18:15:46,374,", "GeneratedTokens is ''"),
        ("2023-11-16 18:15:46,374,2147483648", "GeneratedTokens is '2147483648'"),
        ("2023-11-16 18:15:46,374,٣", "GeneratedTokens is '٣'"),
        ("x" * 5000, "has 1 fields"),
    ],
)
def test_a_broken_line_of_azure_is_named_with_what_was_expected(
    write_trace: WriteTrace, broken: str, told: str
) -> None:
    path = write_trace(azure("2023-11-16 18:15:46,1,1", broken), "trace.csv")
    with pytest.raises(TraceError) as raised:
        trace.load(path)
    text = str(raised.value)
    assert text.startswith(f"{path}, line 3: ")
    assert told in text
    assert "expected" in text
    assert len(text) < len(str(path)) + 300


def test_an_azure_trace_without_its_header_is_refused(write_trace: WriteTrace) -> None:
    path = write_trace("2023-11-16 18:15:46,374,44\n", "trace.csv")
    with pytest.raises(TraceError, match=r"line 1: .* is not the header: expected TIMESTAMP,ContextTokens"):
        trace.load(path)


def test_a_missing_file_and_a_directory_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        trace.load(tmp_path / "none.jsonl")
    (tmp_path / "dir.jsonl").mkdir()
    with pytest.raises(TraceError, match="Is a directory"):
        trace.load(tmp_path / "dir.jsonl")
    with pytest.raises(TraceError, match="null"):
        trace.load(tmp_path / "a\0b.jsonl")

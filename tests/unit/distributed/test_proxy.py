"""HAProxy's configuration: what it says, and that no value can say more than a value."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from mlxinfer.cli.cluster_proxy import proxy
from mlxinfer.distributed import cluster_file
from mlxinfer.distributed.cluster_file import Cluster, Node
from mlxinfer.distributed.proxy import MAX_REPLICAS, ProxyOptions, Replica, configuration
from mlxinfer.errors import InvalidRequestError

SOCKET = Path("/run/haproxy.sock")
TWO = [Replica("studio", "10.0.0.1", 8080), Replica("mini", "mini.local", 8081)]
HOSTILE = [
    "",
    "-a",
    "a b",
    "a\nserver evil 6.6.6.6:80",
    "a\r\nb",
    "a\tb",
    "a#b",
    "a'b",
    'a"b',
    "a\\b",
    "a$HOME",
    "a;b",
    "a%[src]",
    "a,b",
    "unix@/tmp/x",
    "a/b",
    "a:80",
    "fe80::1%eth0",
    "ä",
    "a\x00b",
    "a" * 300,
]


def text_of(replicas: Any = TWO, **changes: Any) -> str:
    return configuration(replicas, ProxyOptions(socket=SOCKET, **changes))


def test_each_replica_is_a_server_that_is_asked_whether_it_is_ready() -> None:
    text = text_of([*TWO, Replica("six", "fd00::6", 9000)])
    servers = re.findall(r"^    server (\S+) (\S+) id \d+$", text, re.MULTILINE)
    assert servers == [("studio", "10.0.0.1:8080"), ("mini", "mini.local:8081"), ("six", "[fd00::6]:9000")]
    assert "http-check send meth GET uri /ready" in text
    assert re.search(r"default-server check .* maxconn 288 tcp-ut 20s\n", text)


def test_a_replica_keeps_its_place_on_the_ring_when_others_come_and_go() -> None:
    def ids(replicas: list[Replica]) -> dict[str, str]:
        return dict(re.findall(r"^    server (\S+) \S+ (id \d+)$", text_of(replicas), re.MULTILINE))

    many = [Replica(f"r{i}", "10.0.0.1", 8000 + i) for i in range(MAX_REPLICAS)]
    assert len(set(ids(many).values())) == MAX_REPLICAS
    assert ids(many[5:9]).items() <= ids(many).items()


def test_the_runtime_socket_is_its_owners() -> None:
    assert "stats socket '/run/haproxy.sock' mode 600 level admin" in text_of()


def test_a_request_is_sent_again_only_where_nothing_was_answered() -> None:
    text = text_of()
    assert "retry-on conn-failure empty-response 503\n" in text
    # A replica that can't (500) or may not (429) is no reason to ask the others, too.
    assert not re.search(r"retry-on .*(429|500|all-retryable)", text)


def test_options_are_where_haproxy_reads_them() -> None:
    text = text_of(host="::1", port=9999, max_body_kb=2048, max_requests=7, timeout_s=60, session_headers=["x-mine"])
    assert "bind [::1]:9999\n" in text
    assert f"tune.bufsize {2048 * 1024 + 16384}\n" in text
    assert " maxconn 7 " in text
    assert "timeout server 60s\n" in text
    assert "req.fhdr(x-mine) if" in text
    assert "x-session-id" not in text


@pytest.mark.parametrize(("count", "factor"), [(1, 0), (2, 150), (3, 225), (8, 250)])
def test_no_replica_gets_more_than_its_part_of_what_runs(count: int, factor: int) -> None:
    text = text_of([Replica(f"r{i}", "h", 8000 + i) for i in range(count)])
    assert f"hash-balance-factor {factor}\n" in text


@pytest.mark.parametrize("value", HOSTILE)
def test_names_hosts_and_headers_are_nothing_else(value: str) -> None:
    with pytest.raises(InvalidRequestError, match="name"):
        Replica(value, "h", 1)
    with pytest.raises(InvalidRequestError, match="host"):
        Replica("r", value, 1)
    with pytest.raises(InvalidRequestError, match="host"):
        ProxyOptions(socket=SOCKET, host=value)
    with pytest.raises(InvalidRequestError, match="header"):
        ProxyOptions(socket=SOCKET, session_headers=[value])


@pytest.mark.parametrize(
    "path",
    ["rel.sock", "/a'b", "/a\nb", "/a,b", "/a$b", '/a"b', "/a\\b", "/a#b", "/ä", "/" + "a" * 120, "/a%b"],
)
def test_a_socket_is_a_plain_path(path: str) -> None:
    with pytest.raises(InvalidRequestError, match="socket"):
        ProxyOptions(socket=Path(path))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("port", 0),
        ("port", 65536),
        ("port", True),
        ("port", "80\nuser root"),
        ("max_body_kb", 63),
        ("max_body_kb", 1 << 20),
        ("max_requests", 0),
        ("timeout_s", 9),
        ("timeout_s", 1.5),
    ],
)
def test_numbers_are_numbers_within_limits(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=f"{field} .* is possible"):
        ProxyOptions(socket=SOCKET, **{field: value})


@pytest.mark.parametrize("port", [0, -1, 65536, "1", None, True])
def test_a_replicas_port_is_one(port: Any) -> None:
    with pytest.raises(InvalidRequestError, match="is possible"):
        Replica("r", "h", port)


@pytest.mark.parametrize(
    ("replicas", "why"),
    [
        ([], "1 to 64"),
        ([Replica(f"r{i}", "h", 1 + i) for i in range(MAX_REPLICAS + 1)], "1 to 64"),
        ([Replica("a", "h", 1), Replica("a", "h", 2)], "two have the name a"),
        ([Replica("a", "h", 1), Replica("b", "h", 1)], "two have the address h:1"),
    ],
)
def test_replicas_are_some_and_distinct(replicas: list[Replica], why: str) -> None:
    with pytest.raises(InvalidRequestError, match=why):
        text_of(replicas)


def run(*arguments: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr)."""
    made = CliRunner().invoke(proxy, arguments)
    if made.exception is not None and not isinstance(made.exception, SystemExit):
        return 2, "", str(made.exception)
    return made.exit_code, made.stdout, made.stderr


def test_the_configuration_goes_to_stdout_and_what_to_do_to_stderr() -> None:
    code, out, said = run("--replica", "127.0.0.1:9001", "--replica", "b=[::1]:9002", "--port", "9000")
    assert code == 0, said
    assert "    server replica1 127.0.0.1:9001 id" in out
    assert "    server b [::1]:9002 id" in out
    assert "haproxy -c -f haproxy.cfg" in said
    assert "set server replicas/replica1 state drain" in said


def test_the_machines_of_a_cluster_are_replicas_at_the_servers_port(tmp_path: Path) -> None:
    file, target = tmp_path / "cluster.toml", tmp_path / "haproxy.cfg"
    nodes = (Node("one", "10.0.0.1", 8, 100), Node("two", "fd00::2", 8, 100, port=7000))
    cluster_file.write(file, Cluster(nodes, secret="0123456789abcdef"))
    code, out, _ = run("--cluster", str(file), "--replica-port", "8123", "-o", str(target), "--json")
    assert code == 0
    assert json.loads(out) == {
        "replicas": [{"name": "one", "address": "10.0.0.1:8123"}, {"name": "two", "address": "[fd00::2]:8123"}],
        "socket": str(tmp_path / "haproxy.sock"),
        "file": str(target),
    }
    text = target.read_text()
    assert "server two [fd00::2]:8123 id" in text
    assert "0123456789abcdef" not in text
    assert run("--cluster", str(file), "-o", str(target))[0] == 2
    assert target.read_text() == text
    assert run("--replica", "h:1", "-o", str(target), "--overwrite")[0] == 0
    assert target.read_text() != text


def test_a_cluster_file_cannot_put_lines_into_the_configuration(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    cluster_file.write(file, Cluster((Node("one", "h'#;$x", 8, 100),), secret="0123456789abcdef"))
    code, out, said = run("--cluster", str(file))
    assert (code, out) == (2, "")
    assert "host" in said


@pytest.mark.parametrize(
    "arguments",
    [
        ["--replica", "nowhere"],
        ["--replica", "h:http"],
        ["--replica", "h:99999"],
        ["--replica", "h:1\nx"],
        ["--replica", "a b=h:1"],
        ["--replica", "h:1", "--cluster", "cluster.toml"],
        ["--replica", "h:1", "--host", "0.0.0.0"],
        ["--replica", "h:1", "--session-header", "a b"],
        ["--replica", "h:1", "--socket", "/a,b"],
    ],
)
def test_wrong_arguments_are_refused_and_nothing_is_printed(arguments: list[str]) -> None:
    assert run(*arguments)[:2] == (2, "")


def test_other_machines_may_call_where_the_replicas_ask_for_keys() -> None:
    code, out, _ = run("--replica", "h:1", "--host", "0.0.0.0", "--keyed")
    assert code == 0
    assert "bind 0.0.0.0:8080\n" in out

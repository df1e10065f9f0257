"""Hosts on one machine: they are apart, they find each other, and nothing of them stays."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import hosts as module
import pytest
from hosts import Hosts, HostsError

pytestmark = pytest.mark.skipif(module.supported() is not None, reason=str(module.supported()))

PING = """
import socket, sys
server = socket.create_server(("0.0.0.0", 5000))
print("ready", flush=True)
print(server.accept()[0].recv(9).decode())
"""
SEND = "import socket, sys; socket.create_connection(('boxb', 5000), timeout=float(sys.argv[1])).sendall(b'hello')"

HOLD = """
import signal, sys, time
from hosts import Hosts
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell starts in the background
with Hosts(2) as hosts:
    child = hosts.popen(hosts[1], ["sleep", "60"])
    print(hosts.folder, *(host.namespace for host in hosts), flush=True)
    time.sleep(60)
"""


def left() -> list[str]:
    """What our process' hosts have left behind."""
    own = f"{module.PREFIX}{os.getpid()}x*"
    return [str(path) for folder in (module.NETNS_RUN, module.NETNS_ETC) for path in folder.glob(own)]


def test_every_host_has_a_name_and_an_address_and_finds_the_others():
    with Hosts(3) as hosts:
        for host in hosts:
            done = hosts.run(host, ["sh", "-c", "hostname; getent hosts boxc; ip -br -4 address show eth0"], timeout=20)
            name, other, own = done.stdout.splitlines()
            assert name == host.name
            assert other.split() == [hosts[2].address, "boxc"]
            assert own.split()[2] == f"{host.address}/24"


def test_ssh_reaches_a_host_with_options_on_both_sides_of_its_name():
    with Hosts(2) as hosts:
        line = ["ssh", "-o", "PasswordAuthentication=no", "-q", "root@boxb", "-o", "ConnectTimeout=10"]
        done = hosts.run(hosts[0], [*line, 'hostname && echo "$TMPDIR"'], timeout=20)
        assert done.stdout.split() == ["boxb", str(hosts.folder / "boxb")]
        unknown = hosts.run(hosts[0], ["ssh", "nowhere", "true"], timeout=20)
        assert (unknown.returncode, unknown.stdout.strip()) == (255, "ssh: no host is called nowhere")


def test_a_link_that_is_down_carries_nothing_until_it_is_up_again():
    with Hosts(2, gbit=1.0) as hosts:
        server = hosts.popen(hosts[1], [sys.executable, "-c", PING], stdout=subprocess.PIPE)
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        hosts.set_link(hosts[1], up=False)
        assert "Error" in hosts.run(hosts[0], [sys.executable, "-c", SEND, "2"], timeout=20).stdout
        hosts.set_link(hosts[1], up=True)
        assert hosts.run(hosts[0], [sys.executable, "-c", SEND, "20"], timeout=30).returncode == 0
        assert server.communicate(timeout=20)[0] == "hello\n"


def test_links_get_the_rate_that_was_asked_for():
    with Hosts(2, gbit=0.1) as hosts:
        assert "rate 100Mbit" in hosts.run(hosts[0], ["tc", "qdisc", "show", "dev", "eth0"], timeout=20).stdout
        hosts.shape(None)
        assert "tbf" not in hosts.run(hosts[0], ["tc", "qdisc", "show", "dev", "eth0"], timeout=20).stdout


def test_what_takes_too_long_is_ended_on_all_hosts():
    with Hosts(2) as hosts:
        other = hosts.popen(hosts[1], ["sleep", "60"])
        with pytest.raises(subprocess.TimeoutExpired, match="sleep"):
            hosts.run(hosts[0], ["sleep", "60"], timeout=0.5)
        assert other.wait(timeout=5) == -signal.SIGTERM


def test_nothing_is_left_after_an_error_inside_or_while_making(monkeypatch):
    with pytest.raises(ZeroDivisionError), Hosts(2) as hosts:
        folder = hosts.folder
        _ = 1 / 0
    assert not folder.exists()
    monkeypatch.setattr(Hosts, "_write_ssh", lambda self: module._command("ip", "no-such-thing"))
    with pytest.raises(HostsError, match="ip no-such-thing"), Hosts(2):
        pass
    assert left() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_removes_the_hosts(number):
    env = {**os.environ, "PYTHONPATH": str(Path(module.__file__).parent)}
    with subprocess.Popen([sys.executable, "-c", HOLD], env=env, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        folder, *namespaces = child.stdout.readline().split()
        assert all((module.NETNS_RUN / name).exists() for name in namespaces)
        child.send_signal(number)
        assert child.wait(timeout=20) != 0
    assert not any((module.NETNS_RUN / name).exists() or (module.NETNS_ETC / name).exists() for name in namespaces)
    assert not Path(folder).exists()


def test_a_killed_run_is_swept_up_by_the_next():
    env = {**os.environ, "PYTHONPATH": str(Path(module.__file__).parent)}
    with subprocess.Popen([sys.executable, "-c", HOLD], env=env, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        folder, *namespaces = child.stdout.readline().split()
        child.kill()
    assert all((module.NETNS_RUN / name).exists() for name in namespaces)
    module.sweep()
    assert not any((module.NETNS_RUN / name).exists() or (module.NETNS_ETC / name).exists() for name in namespaces)
    assert not Path(folder).exists()


def test_counts_that_cannot_be_made_are_refused():
    with pytest.raises(ValueError, match="count is 5; 2 to 4 hosts can be made"):
        Hosts(5)

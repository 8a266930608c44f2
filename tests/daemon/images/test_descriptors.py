"""Which connections of a process tree lead outside it."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from ganger_daemon.images.descriptors import (
    InternetSocket,
    OutsideConnections,
    SocketOwner,
    SocketTables,
    UnixSocket,
    outside_connections,
    owners_of,
    parse_internet,
    parse_packet,
    read_tables,
    unix_peers,
    unsavable,
)

TCP = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 100 1 0 100 0 0 10 0
   1: 0200000A:C350 0300000A:1538 01 00000000:00000000 02:000A0B0C 00000000     0        0 101 2 0 20 4 30 10 -1
 bad line
"""
TCP6 = """\
  sl  local_address                         remote_address                        st tx rx tr tm->when retrnsmt uid
   0: 0000000000000000FFFF00000100007F:1F90 0000000000000000FFFF00000100007F:C351 01 0:0 0:0 0 0 0 102 1 0
   1: 00000000000000000000000001000000:0016 00000000000000000000000001000000:9000 01 0:0 0:0 0 0 0 103 1 0
"""


def owner(inode: int, descriptor: int = 7, pid: int = 12, program: str = "python") -> SocketOwner:
    return SocketOwner(inode, descriptor, pid, program)


def tcp(local: str, remote: str, inode: int, state: str = "01", protocol: str = "tcp") -> InternetSocket:
    return InternetSocket(protocol, local, remote, state, inode)


def judged(owners: list[SocketOwner], *internet: InternetSocket) -> OutsideConnections:
    return outside_connections(owners, SocketTables(internet))


def test_the_kernels_tables_are_parsed_to_readable_addresses() -> None:
    assert parse_internet("tcp", TCP) == [
        tcp("127.0.0.1:8080", "0.0.0.0:0", 100, "0A"),
        tcp("10.0.0.2:50000", "10.0.0.3:5432", 101),
    ]
    assert parse_internet("tcp6", TCP6) == [
        tcp("127.0.0.1:8080", "127.0.0.1:50001", 102, protocol="tcp6"),
        tcp("[::1]:22", "[::1]:36864", 103, protocol="tcp6"),
    ]
    assert parse_packet("sk RefCnt Type Proto Iface R Rmem User Inode\nffff 3 3 0003 2 1 0 0 555\n") == {555}


def test_sockets_are_found_among_the_descriptors() -> None:
    descriptors = {0: "/dev/null", 3: "socket:[100]", 4: "pipe:[9]"}
    assert owners_of(descriptors, 12, "python") == [owner(100, 3)]


def test_a_connection_to_another_machine_is_named_with_its_descriptor() -> None:
    found = judged([owner(101)], tcp("10.0.0.2:50000", "10.0.0.3:5432", 101))
    assert found.tcp == ("connected to 10.0.0.3:5432 (descriptor 7 of python, pid 12)",)
    assert found.refusal(False) == f"{found.tcp[0]}; --close-connections would allow it to be closed"
    assert found.refusal(True) == ""


def test_a_connection_between_two_processes_of_the_tree_stays_inside() -> None:
    ends = tcp("127.0.0.1:8080", "127.0.0.1:50001", 102, protocol="tcp6"), tcp("127.0.0.1:50001", "127.0.0.1:8080", 103)
    assert judged([owner(102), owner(103, pid=13)], *ends) == OutsideConnections(has_inner_tcp=True)
    assert judged([owner(102)], *ends).tcp == ("connected to 127.0.0.1:50001 (descriptor 7 of python, pid 12)",)


def test_a_connection_that_the_tree_has_not_accepted_yet_stays_inside() -> None:
    ends = tcp("127.0.0.1:8080", "127.0.0.1:50001", 0), tcp("127.0.0.1:50001", "127.0.0.1:8080", 103)
    listener = tcp("0.0.0.0:8080", "0.0.0.0:0", 104, "0A")
    assert judged([owner(103), owner(104)], *ends, listener).tcp == ()
    assert judged([owner(103)], *ends, listener).tcp != ()


def test_a_connection_whose_other_end_is_gone_leads_outside() -> None:
    assert judged([owner(103)], tcp("127.0.0.1:50001", "127.0.0.1:8080", 103, "08")).tcp != ()


def test_listening_unconnected_and_closed_sockets_lead_nowhere() -> None:
    found = judged(
        [owner(1), owner(2), owner(3), owner(4)],
        tcp("0.0.0.0:8080", "0.0.0.0:0", 1, "0A"),
        tcp("127.0.0.1:5000", "0.0.0.0:0", 2, "07", "udp"),
        tcp("10.0.0.2:50000", "10.0.0.3:5432", 3, "07"),
    )
    assert found == OutsideConnections()


def test_udp_packet_and_unix_connections_are_refused_even_where_tcp_may_be_closed() -> None:
    tables = SocketTables(
        (tcp("10.0.0.2:5000", "10.0.0.9:8125", 1, "01", "udp"),),
        frozenset([2]),
        {3: UnixSocket(9, ""), 9: UnixSocket(3, "/run/database.sock"), 4: UnixSocket(5, ""), 5: UnixSocket(4, "")},
    )
    found = outside_connections([owner(1), owner(2, 8), owner(3, 9), owner(4, 10), owner(5, 11)], tables)
    assert set(found.others) == {
        "connected to 10.0.0.9:8125 by UDP (descriptor 7 of python, pid 12)",
        "has a packet socket (descriptor 8 of python, pid 12)",
        "connected to /run/database.sock (descriptor 9 of python, pid 12)",
    }
    assert found.refusal(True) != ""


def test_outside_connections_cannot_be_closed_beside_inner_ones() -> None:
    found = OutsideConnections(("connected to 10.0.0.3:5432 (...)",), has_inner_tcp=True)
    assert "cannot be closed alone" in found.refusal(True)


def test_a_socket_that_several_processes_hold_is_named_once_and_a_long_list_is_cut() -> None:
    one = tcp("10.0.0.2:1", "10.0.0.3:80", 1)
    assert len(judged([owner(1), owner(1, pid=13)], one).tcp) == 1
    many = [tcp(f"10.0.0.2:{port}", "10.0.0.3:80", port) for port in range(1, 9)]
    assert judged([owner(port) for port in range(1, 9)], *many).refusal(False).endswith("and 3 more")


def test_a_program_on_a_terminal_is_refused_where_it_takes_its_signals_by_a_descriptor() -> None:
    terminal, signals = {3: "/dev/ptmx", 4: "/dev/pts/0"}, {5: "anon_inode:[signalfd]"}
    assert unsavable(terminal, 12, "tmux", "") == unsavable(signals, 12, "python", "") == ()
    assert unsavable(terminal | signals, 12, "script", "") == (
        "runs a program on a terminal, as `script` does, and would end (script, pid 12)",
    )


def test_the_kernel_names_the_ends_of_unix_and_tcp_connections(tmp_path: Path) -> None:
    first, second = socket.socketpair()
    listener = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(listener.getsockname())
    server, _ = listener.accept()
    path = str(tmp_path / "named.sock")
    named = socket.socket(socket.AF_UNIX)
    named.bind(path)
    with first, second, listener, client, server, named:
        inodes = [os.fstat(each.fileno()).st_ino for each in (first, second, client, server, named)]
        peers = unix_peers()
        assert (peers[inodes[0]].peer, peers[inodes[1]].peer) == (inodes[1], inodes[0])
        assert peers[inodes[4]] == UnixSocket(0, path)
        tables = read_tables(Path("/proc/self/net"))
        assert outside_connections([owner(inode) for inode in inodes], tables) == OutsideConnections(has_inner_tcp=True)
        outside = outside_connections([owner(inode) for inode in (inodes[0], inodes[2])], tables)
        assert len(outside.tcp) == len(outside.others) == 1

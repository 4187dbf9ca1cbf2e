"""An owner is one process exactly: not its successor with the same pid, not a zombie, not another host's."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from gristmill.jobs.owner import Owner, current_owner, is_alive, is_dead, is_local
from tests.jobs.cases import ELSEWHERE, dead_owner

ROOT = Path(__file__).resolve().parents[2]


def test_this_process_is_alive_and_local() -> None:
    me = current_owner()
    assert is_local(me) and is_alive(me) and not is_dead(me)


def test_an_owner_survives_its_text() -> None:
    odd = Owner("host:with:colons/402653", "b-o-o-t", 12, 34)
    assert Owner.from_text(odd.to_text()) == odd
    assert str(odd) == "process 12 on host:with:colons"


def test_a_process_that_ended_is_dead() -> None:
    assert is_dead(dead_owner())


def test_a_zombie_is_dead() -> None:
    code = "from gristmill.jobs.owner import current_owner; print(current_owner().to_text(), flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        owner = Owner.from_text(child.stdout.readline().strip())
        assert is_alive(owner)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and nobody has reaped it
        assert is_dead(owner)


def test_a_process_of_an_earlier_boot_or_with_a_reused_pid_is_dead() -> None:
    me = current_owner()
    assert is_dead(replace(me, boot_id="an-earlier-boot"))
    assert is_dead(replace(me, start_time=me.start_time + 1))


def test_nothing_is_known_of_another_host() -> None:
    assert not is_local(ELSEWHERE) and not is_dead(ELSEWHERE)

"""How many accounts a tenant can have on the link, and who shares one."""

from __future__ import annotations

import pytest

from valved.clients.accounts import AccountKind, LinkAccount, account_of

POD = "pod3c1f0d2e-0000-4000-8000-0123456789ab"
OTHER_POD = "podffffffff-0000-4000-8000-0123456789ab"
DIGITS = "8d1e" * 16
HOMES = [
    f"/kubepods/burstable/{POD}",
    f"/kubepods/{POD}",
    f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-{POD.replace('-', '_')}.slice",
    f"/../../kubepods-besteffort-{POD.replace('-', '_')}.slice",
    f"/docker/{DIGITS}",
    f"/system.slice/docker-{DIGITS}.scope",
    "/user.slice/user-1000.slice",
]
INSIDE = ["", f"/cri-containerd-{DIGITS}.scope", f"/{OTHER_POD}", "/user-7.slice", "/user@1000.service/app.slice/x"]


@pytest.mark.parametrize("home", HOMES)
def test_users_and_groups_inside_a_home_are_never_accounts_of_their_own(home):
    users = [1000, 65534, 2**32 - 2, *([] if "user-" in home else [0])]
    accounts = {account_of(uid, home + inside) for uid in users for inside in INSIDE}

    assert accounts == {LinkAccount(AccountKind.HOME, home)}


@pytest.mark.parametrize("uid", [0, 1000])
def test_two_homes_never_share_an_account(uid):
    assert len({account_of(uid, home) for home in (*HOMES, f"/kubepods/{OTHER_POD}")}) == len(HOMES) + 1


def test_a_service_of_root_never_shares_the_account_of_the_user_from_whose_login_it_was_started():
    """By sudo, which leaves it in the user's slice."""
    login = "/user.slice/user-1000.slice/session-4.scope"

    assert account_of(0, login) != account_of(1000, login)
    assert {account_of(0, f"{login}/libpod-{DIGITS}{inside}") for inside in INSIDE} == {
        LinkAccount(AccountKind.HOME, f"{login}/libpod-{DIGITS}")
    }


def test_users_whom_root_starts_from_its_own_login_never_share_an_account():
    """By su, for one service and one batch job."""
    login = "/user.slice/user-0.slice/session-3.scope"

    assert {account_of(uid, login) for uid in (0, 1001, 1002)} == {
        LinkAccount(AccountKind.ROOT, login),
        LinkAccount(AccountKind.USER, 1001),
        LinkAccount(AccountKind.USER, 1002),
    }
    assert account_of(1001, f"{login}/docker/{DIGITS}") == LinkAccount(AccountKind.HOME, f"{login}/docker/{DIGITS}")


def test_users_outside_a_home_never_share_an_account_whatever_their_group():
    groups = ["/", "", "/system.slice/batch.service", "/podium", "/user-1000.slice.d", "/kubepods/podx"]

    assert {account_of(1000, group) for group in groups} == {LinkAccount(AccountKind.USER, 1000)}
    assert {account_of(0, group) for group in groups} == {LinkAccount(AccountKind.ROOT, group) for group in groups}


def test_an_account_is_never_called_by_anything_but_its_name():
    """Its events are read by people."""
    pod = f"/kubepods/burstable/{POD}"
    called = {
        account_of(0, pod): f"the pod of UID {POD.removeprefix('pod')}",
        account_of(7, f"/kubepods.slice/kubepods-{POD.replace('-', '_')}.slice/x"): f"the pod of UID {POD[3:]}",
        account_of(0, f"/system.slice/docker-{DIGITS}.scope"): f"container {DIGITS[:12]}",
        account_of(1000, "/user.slice/user-1000.slice/session-4.scope"): "user 1000",
        account_of(1001, "/system.slice/batch.service"): "user 1001",
        account_of(0, "/system.slice/batch.service"): "root in the control group /system.slice/batch.service",
        account_of(0, ""): "root in the control group /",
        LinkAccount(AccountKind.AWAITED, 4711): "the service of process 4711",
    }

    assert [account.called() for account in called] == list(called.values())
    assert account_of(0, pod).called("team/batch-7") == "pod team/batch-7"


def test_a_control_group_that_a_stranger_named_never_writes_on_a_terminal():
    """Root in a container that has no long number may make groups."""
    called = account_of(0, "/lxc/one/\x1b]0;owned\x07\x1b[2J" + 5000 * "x").called()

    assert called.startswith("root in the control group /lxc/one/?]0;owned")
    assert called.isprintable()
    assert len(called) < 300

"""The live page in a real browser: its content, its requests, and its messages without data."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import httpx
import msgspec
import pytest
from api_server import ApiServer, body
from browser import CHROMIUM, WHY_SKIPPED, Browser, Tab
from conditions import until
from msgspec.structs import replace
from page_server import PageServer
from status_pictures import service, with_states, with_tiers

from disagg.core.status import GroupStatus, RankStatus, ServiceStatus
from disagg.plan.transfer import describe_bytes
from disagg.top.rates import append, paired, rates
from disagg.top.tiers import saved_s, tier_hits
from disagg.top.words import count_words, rate_words, time_words

EVIL = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def running_browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip(WHY_SKIPPED)
    with Browser(tmp_path_factory.mktemp("browser")) as running:
        yield running


@pytest.fixture
def browser(running_browser: Browser) -> Iterator[Browser]:
    """The browser of all tests, without a page."""
    yield running_browser
    running_browser.close_tabs()


@pytest.fixture
def server() -> Iterator[PageServer]:
    with PageServer() as running:
        yield running


def look(tab: Tab) -> None:
    """One more look, without waiting for the second to be over."""
    tab.value("(async () => { while (looking) await new Promise((r) => setTimeout(r, 2)); await look(); })()")


def shown(browser: Browser, server: PageServer, **media: Any) -> Tab:
    """A page that has looked twice."""
    tab = browser.tab(server.url, **media)
    tab.until("!document.getElementById('main').hidden")
    look(tab)
    return tab


def texts(tab: Tab, selector: str) -> list[str]:
    return list(
        tab.value(f"[...document.querySelectorAll({json.dumps(selector)})].map((e) => e.textContent)")
    )


def no_trouble(tab: Tab, server: PageServer) -> None:
    """Checks that the page logged no problem and requested no other server."""
    assert tab.problems == []
    assert {httpx.URL(url).copy_with(raw_path=b"/") for url in tab.requested} == {httpx.URL(server.url)}
    assert {httpx.URL(url).path for url in tab.requested} == {"/", "/status"}


def test_the_page_needs_no_key_and_allows_nothing_but_itself() -> None:
    with ApiServer("secret") as server:
        reply = server.client.get("/")
        assert server.client.get("/status").status_code == 401
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert reply.headers["cache-control"] == "no-cache"
    rules = dict(rule.split(" ", 1) for rule in reply.headers["content-security-policy"].split("; "))
    assert rules["default-src"] == "'none'"
    assert rules["connect-src"] == "'self'"
    assert rules["frame-ancestors"] == "'none'"
    for kind in ("script-src", "style-src"):
        assert re.fullmatch(r"'sha256-[\w+/]{43}='", rules[kind]), "no 'unsafe-inline', no host"
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", reply.text)


def test_numbers_of_a_server_that_works(browser: Browser, server: PageServer) -> None:
    tab = shown(browser, server)
    assert tab.text("#model") == "tiny"
    assert tab.text("#ready") == "ready"
    tile = [" | ".join(one.split("\n")) for one in texts(tab, ".tile output")]
    assert tile == ["5", "120 ms", "11 ms", "120 tok/s", "12 MB/s", "1"]
    assert texts(tab, ".tile p")[5] == "3 refused · 2 aborted"
    assert texts(tab, "#prefill h3") == ["prefill"]
    assert texts(tab, "#decode h3") == ["decode", "decode-2"]
    assert "2 running · 3 waiting · busy 60% · 20% from cache" in texts(tab, "#prefill p")
    assert "96 of 512 pages · 19% waste" in texts(tab, "#decode p")
    assert texts(tab, "#prefill li span:last-child") == ["staging 38% of 64 MiB"] * 2
    assert texts(tab, "#labels text") == ["3 MB/s"] * 4
    assert texts(tab, "#flow-rows tr:first-child td")[:4] == ["prefill r0", "decode r0", "staged", "3 MB/s"]
    assert tab.value("lines.size") == tab.value("document.getAnimations().length") == 4
    assert texts(tab, "#recent td:last-child") == [
        "runs",
        "runs",
        "error peer_lost",
        "aborted",
        "length",
        "stop",
    ]
    assert texts(tab, "#axis span") == ["0", "1 s", "2 s", "3 s", "4 s"]
    kinds = tab.value(
        "[...document.querySelectorAll('#recent tr:nth-child(5) .way > *')].map((e) => e.className)"
    )
    assert kinds == ["queue", "reserve", "prefill", "decode", "moved"]
    before = texts(tab, "#about")
    looks = server.looks
    until(lambda: server.looks > looks + 1), "it looks by itself"
    look(tab)
    assert texts(tab, "#about") != before
    no_trouble(tab, server)


def test_states_of_recurrent_layers(browser: Browser, server: PageServer) -> None:
    tab = shown(browser, server)
    assert not tab.value("[...document.querySelectorAll('.slots')].some((e) => e.offsetParent)")
    prefill, decode, _ = service(1.0).groups
    only_rows = replace(with_states(decode), cached_state_slots=0, cached_states=0)
    server.shape = {"groups": (with_states(prefill), only_rows)}
    look(tab)
    assert "20 of 40 states · 8 of 32 cached · 72 MiB" in texts(tab, "#prefill p")
    assert "20 of 40 states · 72 MiB" in texts(tab, "#decode p")
    widths = tab.value(
        "[...document.querySelectorAll('#prefill .slots > i')].map((e) => parseFloat(e.style.width))"
    )
    assert [round(width, 2) for width in widths] == [27.78, 11.11]
    no_trouble(tab, server)


def test_graphs_and_cards_use_the_whole_width(browser: Browser, server: PageServer) -> None:
    tab = shown(browser, server, width=1400)
    look(tab)
    for line in tab.value("[...document.querySelectorAll('.spark .line')].map((e) => e.getAttribute('d'))"):
        begin, *_, end = [float(point.split()[0]) for point in line.removeprefix("M").split("L")]
        assert (begin, end) == (0, 100)
    cards = "[...document.querySelectorAll('.side')].reduce((sum, e) => sum + e.offsetWidth, 0)"
    assert tab.value(f"{cards} / document.getElementById('stage').offsetWidth") > 0.75


def test_cards_name_the_devices_of_their_ranks(browser: Browser, server: PageServer) -> None:
    ranks = (RankStatus("decode r0", 0, "NVIDIA H200"), RankStatus("decode r1", 1, "NVIDIA H200"))
    groups = (
        GroupStatus("prefill", "prefill", (RankStatus("prefill r0", 0, "cpu"),)),
        GroupStatus("decode", "decode", ranks),
    )
    server.shape = {"groups": groups}
    tab = shown(browser, server)
    assert texts(tab, ".group > p:first-of-type") == ["1 rank on cpu", "2 ranks on NVIDIA H200"]


def test_a_real_service_under_load(browser: Browser) -> None:
    with ApiServer() as server:
        server.set(statuses=service(10.0).groups, hold_after=3)
        tab = browser.tab(server.url)
        tab.until("pictures.length")
        assert texts(tab, ".tile output")[0] == "0"
        assert texts(tab, "#decode h3") == ["decode", "decode-2"]
        with server.client.stream(
            "POST", "/v1/completions", json=body("", stream=True, max_tokens=9)
        ) as reply:
            lines = reply.iter_lines()
            next(lines)
            look(tab)
            assert texts(tab, ".tile output")[0] == "1"
            assert texts(tab, "#recent td:last-child") == ["runs"]
            server.set(statuses=service(12.0).groups)
            server.go()
            list(lines)
        look(tab)
        assert texts(tab, ".tile output")[0] == "0"
        assert texts(tab, "#recent td:last-child") == ["length"]
        assert texts(tab, "#labels text") != []
        assert tab.problems == []


def test_lower_tiers_of_the_prefix_cache(browser: Browser, server: PageServer) -> None:
    prefill, decode, *_ = service(100.0).groups
    server.shape = {"groups": (with_tiers(prefill, 100.0), decode)}
    tab = shown(browser, server)
    words = "25% of host memory · 10 pages under way · 32 s saved"
    assert [text for text in texts(tab, "p.tiers") if text] == [words]
    groups = [with_tiers(prefill, at_s) for at_s in (0.0, 1.0, 60.0)]
    groups += [replace(groups[1], prompt_tokens_per_s=0.0), prefill]
    values = msgspec.json.encode(groups).decode()
    assert tab.value(f"{values}.map((one) => savedSeconds({{...GROUP, ...one}}))") == [
        pytest.approx(saved_s(group)) for group in groups
    ]
    for counts in ((400, 350, 150, 100), (0, 5, 5, 5), (10, 20, 5, 7)):
        assert tab.value(f"tierHits({', '.join(map(str, counts))})") == pytest.approx(
            list(tier_hits(*counts))
        )


def test_its_arithmetic_is_that_of_top(browser: Browser, server: PageServer) -> None:
    tab = shown(browser, server)
    first = service(10.0, (2,), (1,))
    came = [service(11.5), service(12.25, (8, 2), (4, 4)), service(13.0, (8, 2), (4, 4)), service(19.5)]
    late = service(16.8, (8, 2), (4, 4))
    for history in (
        came[:1],
        [first, *came[:3], late],
        [first, *came[:2]],
        [first, *came[:3]],
        [first, *came],
        [*came, service(0.5)],
    ):
        pictures: list[ServiceStatus] = []
        for one in history:
            pictures = append(pictures, one)
        theirs = tab.value(
            f"(() => {{ const found = rates({msgspec.json.encode(history).decode()}.map(filled).reduce(append, []));"
            "return {...found, paired: paired(found.flows)}; })()"
        )
        ours = rates(pictures)
        assert close(theirs.pop("paired"), msgspec.to_builtins(paired(ours.flows)))
        assert close(theirs, msgspec.to_builtins(ours))
    values = [0, 1e-9, 0.0042, 0.9996, 1, 61.77, 99.96, 119.9, 150, 999.4, 999.6, 1023, 7500, 3.21e7, 4.56e12]
    for name, words in (("rate", rate_words), ("count", count_words), ("time", time_words)):
        assert tab.value(f"{values}.map({name}Words)") == [words(value) for value in values]
    sizes = [0, 1, 999, 1000, 1023, 65536, 3 << 20, 1 << 40, 7 << 50]
    assert tab.value(f"{sizes}.map(bytesWords)") == [describe_bytes(size) for size in sizes]


def close(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(close(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(close, one, other))
    return bool(one == other if isinstance(one, str) else one == pytest.approx(other))


def test_groups_that_come_and_go(browser: Browser, server: PageServer) -> None:
    server.shape = {
        "prefill": (),
        "decode": (),
        "ready": "no decode and no prefill group is up",
        "recent": (),
    }
    tab = shown(browser, server)
    assert texts(tab, ".none") == ["no prefill group is up", "no decode group is up"]
    assert tab.text("#ready") == "no decode and no prefill group is up"
    assert tab.text("#no-recent") == "no request yet"
    server.shape = {"decode": (1, 1), "draining": ("decode-2",)}
    look(tab)
    assert texts(tab, ".none") == []
    assert tab.value("cards.decode.get('decode-2').chip.textContent") == "drains"
    server.shape = {"decode": (1, 1), "suspected": ("decode-2",)}
    look(tab)
    assert tab.value("cards.decode.get('decode-2').chip.textContent") == "silent"
    server.shape = {"decode": (1,)}
    look(tab)
    assert texts(tab, "#decode h3") == ["decode"]
    assert texts(tab, "#flow-rows td:nth-child(2)") == ["decode r0"] * 2
    server.shape = {"prefill": (8,), "decode": (8,)}
    look(tab)
    look(tab)
    assert texts(tab, "#flow-rows td:first-child") == ["prefill"] * 2, "64 flows are summed"
    assert texts(tab, "#labels text") == ["96 MB/s"] * 2
    server.shape = {"prefill": (8,) * 3, "decode": (4,) * 6}
    look(tab)
    assert tab.value("lines.size") == 36
    assert tab.value("document.documentElement.scrollWidth <= innerWidth")
    no_trouble(tab, server)


def test_groups_that_prefill_and_decode(browser: Browser, server: PageServer) -> None:
    ranks = (RankStatus("colocated r0", 0, "cpu"), RankStatus("colocated r1", 1, "cpu"))
    server.shape = {"groups": (GroupStatus("colocated", "colocated", ranks, tokens_total=7),)}
    tab = shown(browser, server)
    assert texts(tab, "#prefill h3") == ["colocated"]
    assert texts(tab, "#decode h3") == texts(tab, ".none") == texts(tab, "#flow-rows td") == []
    no_trouble(tab, server)


def test_lines_end_at_their_ranks(browser: Browser, server: PageServer) -> None:
    server.shape = {"prefill": (2, 1), "decode": (1, 2)}
    tab = shown(browser, server)
    ends = tab.value(
        """[...lines].map(([key, {bed}]) => {
          const stage = document.getElementById("stage").getBoundingClientRect(), names = JSON.parse(key);
          return ["prefill", "decode"].map((role, at) => {
            const point = bed.getPointAtLength(at * bed.getTotalLength());
            const card = cards[role].get(groupOf(names[at])), row = card.known.get(names[at]).root;
            const {left, right} = card.root.getBoundingClientRect(), {top, bottom} = row.getBoundingClientRect();
            const x = point.x + stage.left, y = point.y + stage.top;
            return [Math.abs(x - (at ? left : right)) < 1, top < y && y < bottom];
          });
        })"""
    )
    assert ends == [[[True, True]] * 2] * 9


def test_names_are_text(browser: Browser, server: PageServer) -> None:
    prefill, decode, _ = service(1.0).groups
    [route, *_] = prefill.ranks[0].routes
    rank = replace(prefill.ranks[0], name=f"{EVIL} r0", routes=(replace(route, target="__proto__ r0"),))
    other = replace(decode, name="__proto__", ranks=(replace(decode.ranks[0], name="__proto__ r0"),))
    server.shape = {
        "model": EVIL,
        "version": EVIL,
        "ready": EVIL,
        "groups": (replace(prefill, name=EVIL, ranks=(rank,), broken=EVIL), other),
        "draining": (EVIL,),
        "recent": (replace(service(1.0).recent[2], id=EVIL, prefill=EVIL, decode=EVIL, error=EVIL),),
    }
    tab = shown(browser, server)
    assert tab.value("document.images.length + document.querySelectorAll('[onerror]').length") == 0
    assert tab.text("#model") == EVIL
    assert texts(tab, "#prefill h3") == [EVIL]
    assert texts(tab, "#decode h3") == ["__proto__"]
    assert tab.value("lines.size") == 1
    assert texts(tab, "#recent td")[-1] == f"error {EVIL}"
    tab.value("document.querySelector('.ranks li').scrollIntoView()")
    x, y = tab.value(
        "(({x, y}) => [x + 5, y + 5])(document.querySelector('.ranks li').getBoundingClientRect())"
    )
    tab.point(x, y)
    assert EVIL in tab.until("document.getElementById('tip').textContent")
    no_trouble(tab, server)


def test_the_page_requests_a_key_and_keeps_it_in_the_tab(browser: Browser) -> None:
    with PageServer("secret") as server:
        tab = browser.tab(server.url)
        tab.until("document.activeElement.id === 'key'")
        assert tab.value("document.getElementById('main').hidden")
        tab.type("wrong\r")
        tab.until("document.getElementById('key-said').textContent.includes('not one of')")
        tab.type("not äscii\r")
        tab.type("secret\r")
        tab.until("!document.getElementById('main').hidden")
        assert not tab.value("!!document.getElementById('key-form').offsetParent")
        tab.load()
        tab.until("pictures.length > 0")
        assert tab.value("[localStorage.length, document.cookie, sessionStorage.getItem('key')]") == [
            0,
            "",
            "secret",
        ]
        assert all("401" in one for one in tab.problems), "the browser logs a 401"
        assert len(tab.problems) == 2
        assert not any("secret" in url for url in tab.requested)


def test_a_server_that_stops_and_one_that_restarts(browser: Browser) -> None:
    with PageServer() as server:
        tab = shown(browser, server)
        look(tab)
        server.restart()
        look(tab)
        assert "was restarted" in tab.text("#notice")
        assert tab.value("pictures.length") == 1, "old totals are not compared with new ones"
        look(tab)
        assert texts(tab, ".tile output")[3] == "120 tok/s"
        no_trouble(tab, server)
    look(tab)
    assert "has been unreachable since" in tab.text("#notice")
    assert tab.text("#ready") == "unreachable"
    assert tab.value("document.getElementById('main').className") == "stale"
    assert texts(tab, "#decode h3") == ["decode", "decode-2"], "the last status stays"
    assert tab.value("timer > 0"), "the page retries"


def test_hidden_pages_send_no_requests(browser: Browser, server: PageServer) -> None:
    tab = shown(browser, server)
    tab.value("Object.defineProperty(document, 'hidden', {value: true, configurable: true})")
    looks = server.looks
    look(tab)
    assert server.looks == looks
    tab.value("delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))")
    until(lambda: server.looks > looks)


def test_requests_that_only_wait_leave_room(browser: Browser, server: PageServer) -> None:
    waiting, *others = service(11.0).recent
    server.shape = {"recent": (waiting,) * 40 + tuple(others) * 3}
    tab = shown(browser, server)
    endings = texts(tab, "#recent td:last-child")
    assert len(endings) == 16
    assert endings[:4] == ["runs"] * 4
    assert endings[4:9] == ["runs", "error peer_lost", "aborted", "length", "stop"]
    server.shape = {"recent": (waiting,) * 40 + (others[0],)}
    look(tab)
    assert texts(tab, "#recent td:nth-child(2)") == ["- → -"] * 15 + ["prefill → decode-2"]


def test_narrow_windows_calm_people_and_dark_rooms(browser: Browser, server: PageServer) -> None:
    tab = shown(browser, server, width=390, prefers_reduced_motion="reduce", prefers_color_scheme="dark")
    assert tab.value("document.documentElement.scrollWidth") <= 390
    assert tab.value("document.getAnimations().length") == 0
    assert texts(tab, "#flow-rows td:nth-child(4)") == ["3 MB/s"] * 4
    assert tab.value("document.getElementById('flow-rows').getBoundingClientRect().width") > 200, (
        "in place of lines"
    )
    assert tab.value("document.querySelector('.way').getBoundingClientRect().width") > 90
    no_trouble(tab, server)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(browser: Browser, server: PageServer, scheme: str) -> None:
    """WCAG AA: 4.5 to 1 for text, 3 to 1 for what is drawn."""
    tab = shown(browser, server, prefers_color_scheme=scheme)

    def light(name: str) -> float:
        color = tab.value(f"getComputedStyle(document.documentElement).getPropertyValue('--{name}')").strip()
        parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [one / 12.92 if one <= 0.03928 else ((one + 0.055) / 1.055) ** 2.4 for one in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def contrast(one: str, other: str) -> float:
        low, high = sorted((light(one), light(other)))
        return (high + 0.05) / (low + 0.05)

    for ink, paper in [
        *((ink, paper) for ink in ("ink", "soft") for paper in ("card", "paper")),
        *((f"{mood}", f"{mood}-paper") for mood in ("good", "warn", "bad")),
        ("soft", "track"),
        ("move-ink", "card"),
        ("bad", "card"),
        ("warn", "card"),
    ]:
        assert contrast(ink, paper) >= 4.5, f"{ink} on {paper}"
    for mark in ("prefill", "decode", "move"):
        assert contrast(mark, "card") >= 3, mark
    for one, other in pairwise(("prefill", "move", "decode")):
        assert one != other

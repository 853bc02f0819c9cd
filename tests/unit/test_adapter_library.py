"""Adapters by name: when they are read, which version a request gets, and what is refused."""

from __future__ import annotations

import threading
import time

import msgspec
import pytest
from support.adapters import Copy, FakeReader, digest_of, slots_of
from support.data_plane import FeatureWorker, answer, make_feature_run
from support.patience import WAIT_SECONDS
from support.simulate import make_request

from engine.config.cache import CacheConfig
from engine.config.near import did_you_mean_of_many
from engine.config.sched import SchedulerConfig
from engine.core.recording import describe, record
from engine.core.replay import replay
from engine.errors import ConfigError, RequestError
from engine.kv.manager import KVManager
from engine.lora.loading import Order, ThreadedReader
from engine.messages.adapters import AdapterSource
from engine.sched.policies import POLICIES
from engine.sched.scheduler import Scheduler

SOURCE = AdapterSource


class Doors:
    """A run whose requests come in as a client sends them, with names of adapters."""

    def __init__(self, reader: FakeReader, max_loras: int = 2, **options) -> None:
        run_options = options.pop("run", {})
        self.reader = reader
        self.slots = slots_of(reader, max_loras, **options)
        assert self.slots.library is not None
        self.library = self.slots.library
        self.run = make_feature_run(resources=[self.slots], **run_options)

    def add(self, request_id: str, adapter: str | None, source=None, num_output=3, length=20):
        request = make_request(
            request_id, [7] * length, num_output, adapter=adapter, adapter_source=source
        )
        self.run.add(self.slots.resolved(request))

    def load(self, name: str, path: str, number: int = 0, *, replaces: bool = False) -> dict:
        """Load as a client does; the reader must not be slow."""
        self.library.read(f"{name} {path}", name, number, path, replaces)
        digest = self.library.state(f"{name} {path}")
        assert digest is not None
        return self.library.put(f"{name} {path}", name, number, path, digest)

    def tokens_of(self, content: str | None, num_output=3, length=20) -> list[int]:
        """What the fake model says with an adapter of this content."""
        digest = None if content is None else digest_of(content)
        return answer(make_request("?", [7] * length, num_output, adapter=digest))


def test_a_request_waits_until_its_adapter_is_read_and_others_go_on():
    doors = Doors(FakeReader(a="A", is_slow=True))
    doors.add("0", "x", SOURCE("a", 1))
    doors.add("1", None)
    for _ in range(3):
        doors.run.step()
    assert doors.run.outputs == {"0": [], "1": doors.tokens_of(None)}
    assert list(doors.run.scheduler.roster.parked) == ["0"]
    doors.reader.finish("a")
    doors.run.drain()
    assert doors.run.outputs["0"] == doors.tokens_of("A")


def test_a_reading_makes_way_only_for_others():
    doors = Doors(FakeReader(is_slow=True, a="A"))
    doors.add("first", "x", SOURCE("a", 1))
    for _ in range(2):
        doors.run.step()
    assert doors.reader.readings[0].is_alone
    doors.add("other", None)
    for _ in range(2):
        doors.run.step()
    assert not doors.reader.readings[0].is_alone


def test_the_wait_is_charged_to_the_adapter():
    now = [0.0]
    doors = Doors(FakeReader(a="A", is_slow=True), run={"clock": lambda: now[0]})
    doors.add("0", "x", SOURCE("a"))
    doors.run.step()
    now[0] = 5.0
    doors.reader.finish("a")
    doors.run.drain()
    assert doors.run.ends["0"].waits == {"adapter": 5.0}


def test_an_adapter_that_cannot_be_read_fails_its_own_requests_only():
    doors = Doors(FakeReader(a="A", b=ConfigError("adapter 'y': rank 999 is above the limit")))
    doors.add("0", "x", SOURCE("a"))
    doors.add("1", "y", SOURCE("b"))
    doors.add("2", "y", SOURCE("b"))
    doors.run.drain()
    assert doors.run.outputs["0"] == doors.tokens_of("A")
    for name in ("1", "2"):
        end = doors.run.ends[name]
        assert (end.code, end.reason) == ("adapter_failed", "error")
        assert end.message == "the adapter cannot be used: adapter 'y': rank 999 is above the limit"
    with pytest.raises(RequestError, match="'y' is not loaded; there are: x"):
        doors.add("3", "y")
    doors.reader.disk["b"] = "B"  # repaired
    doors.add("4", "y", SOURCE("b"))
    doors.run.drain()
    assert doors.run.outputs["4"] == doors.tokens_of("B")


def test_requests_hit_only_prefixes_of_the_same_content():
    doors = Doors(FakeReader(a="A", b="B", c="A"), run={"policy": "lpm"})
    for name, source in (("x", "a"), ("y", "b"), ("z", "c"), ("x", "a")):
        doors.add(f"{name}{len(doors.run.outputs)}", name, SOURCE(source), length=40)
        doors.run.drain()
    cached = {name: starts[0].num_cached_tokens for name, starts in doors.run.starts.items()}
    assert cached == {"x0": 0, "y1": 0, "z2": 32, "x3": 32}, "z has the content of x"


def test_a_prefix_that_was_looked_up_before_the_adapter_was_known_is_looked_up_again():
    doors = Doors(FakeReader(a="A", is_slow=True), run={"policy": "lpm"})
    doors.add("0", "x", SOURCE("a"), length=40)
    doors.run.step()
    doors.reader.finish("a")
    doors.run.drain()
    doors.library.remove("x")
    doors.add("1", "x", SOURCE("a"), length=40)
    doors.run.step()
    doors.reader.finish("a")
    doors.run.drain()
    assert doors.run.starts["1"][0].num_cached_tokens == 32


def test_requests_go_on_with_the_version_that_they_began_with():
    doors = Doors(FakeReader(a="A"), max_loras=2)
    doors.load("x", "a")
    doors.add("old", "x", num_output=6)
    doors.run.step()
    doors.reader.disk["a"] = "A2"
    info = doors.load("x", "a", replaces=True)
    assert info["digest"] == digest_of("A2")
    doors.add("new", "x", num_output=6)
    doors.run.drain()
    assert doors.run.outputs["old"] == doors.tokens_of("A", 6)
    assert doors.run.outputs["new"] == doors.tokens_of("A2", 6)
    assert doors.run.starts["new"][0].num_cached_tokens == 0, "nothing of the old version is read"


def test_a_request_that_replaces_waits_for_the_new_files_and_others_use_the_old():
    doors = Doors(FakeReader(a="A"))
    doors.load("x", "a", 1)
    doors.reader.disk["a"], doors.reader.is_slow = "A2", True
    doors.add("new", "x", SOURCE("a", 1, replaces=True))
    doors.add("old", "x")
    doors.run.step()
    doors.run.step()
    doors.reader.finish("a")
    doors.run.drain()
    doors.add("later", "x")
    doors.run.drain()
    assert doors.run.outputs["old"] == doors.tokens_of("A")
    assert doors.run.outputs["new"] == doors.run.outputs["later"] == doors.tokens_of("A2")


def test_a_load_that_has_ended_is_not_undone_by_a_request_that_came_before_its_end():
    doors = Doors(FakeReader(a="A"))
    doors.load("x", "a")
    doors.reader.disk.update(b="B", c="C")
    doors.reader.is_slow = True
    doors.add("early", "x", SOURCE("b", replaces=True))
    doors.library.read("ticket", "x", 0, "c", replaces=True)
    doors.run.step()
    doors.reader.finish("c")
    doors.library.put("ticket", "x", 0, "c", doors.library.state("ticket"))
    doors.reader.finish("b")
    doors.run.drain()
    doors.add("later", "x")
    doors.run.drain()
    assert doors.run.outputs["early"] == doors.tokens_of("B")
    assert doors.run.outputs["later"] == doors.tokens_of("C")


def test_after_an_unload_running_and_waiting_requests_end_and_new_ones_are_refused():
    doors = Doors(FakeReader(a="A"), run={"max_num_seqs": 1})
    doors.load("sql", "a")
    doors.add("0", "sql")
    doors.add("1", "sql")
    doors.run.step()
    removed = doors.library.remove("sql")
    assert removed is not None and removed["name"] == "sql"
    with pytest.raises(RequestError, match="adapter 'sql' is not loaded") as caught:
        doors.add("2", "sql")
    assert caught.value.code == "model_not_found"
    doors.run.drain()
    assert doors.run.outputs["0"] == doors.run.outputs["1"] == doors.tokens_of("A")
    assert doors.library.remove("sql") is None


def test_an_unknown_name_is_refused_with_near_ones():
    doors = Doors(FakeReader(a="A"))
    doors.load("support-de", "a")
    with pytest.raises(RequestError, match=r"adapter 'suport-de' is not loaded.*'support-de'"):
        doors.add("0", "suport-de")


def test_a_wrong_name_among_thousands_is_refused_with_near_ones_at_once():
    names = [f"customer-{i}-adapter-v{i % 7}" for i in range(5000)]
    assert did_you_mean_of_many("custmer-45-adapter-v3", names).startswith("; did you mean")
    assert "'customer-45-adapter-v3'" in did_you_mean_of_many("custmer-45-adapter-v3", names)
    assert did_you_mean_of_many("x" * 10**6, names) == ""


@pytest.mark.parametrize(
    ("name", "source", "reason"),
    [
        ("x", SOURCE("b"), "was loaded from a, not from 'b'"),
        ("x", SOURCE("a", 2), "has lora_int_id 1, not 2"),
        ("y", SOURCE("b", 1), "lora_int_id 1 is that of adapter 'x'"),
        ("", SOURCE("b"), "lora_name is ''"),
        ("a\0b", SOURCE("b"), "lora_name is"),
    ],
)
def test_a_name_or_number_of_another_adapter_is_refused(name, source, reason):
    doors = Doors(FakeReader(a="A", b="B"))
    doors.load("x", "a", 1)
    with pytest.raises(RequestError, match=reason):
        doors.add("0", name, source)


def test_numbers_that_the_core_has_chosen_make_way():
    doors = Doors(FakeReader(a="A", b="B", c="C"))
    assert [doors.load(name, name)["number"] for name in "ab"] == [1, 2]
    doors.add("0", "c", SOURCE("c", 1))
    doors.add("1", "b", SOURCE("b", 9))
    doors.run.drain()
    assert {each["name"]: each["number"] for each in doors.library.listed()} == {
        "a": 3,
        "b": 9,
        "c": 1,
    }


def test_a_client_loads_all_or_nothing():
    doors = Doors(FakeReader(a="A", b=ConfigError("b is damaged")))
    doors.library.read("ticket", "y", 0, "b")
    with pytest.raises(ConfigError, match="b is damaged"):
        doors.library.state("ticket")
    assert doors.library.listed() == []
    doors.library.read("ticket", "x", 0, "a")
    doors.library.cancel("ticket")
    assert doors.library.listed() == []
    with pytest.raises(ConfigError, match="no adapter is being read for 'ticket'"):
        doors.library.state("ticket")
    doors.load("x", "a")
    with pytest.raises(RequestError, match="adapter 'x' is loaded already"):
        doors.load("x", "a")


def test_a_core_that_starts_again_reads_what_was_loaded_when_it_is_used():
    doors = Doors(FakeReader(a="A", b="B2"))
    doors.library.put("of another core", "x", 1, "a", digest_of("A"))
    doors.library.put("of another core", "y", 2, "b", digest_of("B"))
    doors.add("0", "x")
    doors.add("1", "y")
    doors.run.drain()
    assert doors.run.outputs["0"] == doors.tokens_of("A")
    assert "have changed since it was loaded" in doors.run.ends["1"].message
    doors.add("2", "y")
    doors.run.drain()
    assert doors.run.outputs["2"] == doors.tokens_of("B2")


def test_host_copies_leave_least_recently_used_first_and_come_back():
    doors = Doors(FakeReader(a="A", b="B", c="C"), max_loras=1, most_copies=2)
    for name in ("a", "b", "a", "c", "b"):
        doors.add(str(len(doors.run.outputs)), name, SOURCE(name))
        doors.run.drain()
    assert doors.reader.paths == ["a", "b", "c", "b"]
    counters = doors.slots.counters()
    assert counters["num_read"] == 4 and counters["num_dropped"] == 2
    assert doors.slots.use().num_host_copies == 2


def test_no_more_is_read_than_fits_while_requests_wait():
    names = "abcdef"
    reader = FakeReader(**{name: name.upper() for name in names})
    doors = Doors(reader, max_loras=1, most_copies=2)
    for name in names:
        doors.add(name, name, SOURCE(name))
        assert doors.slots.use().num_host_copies <= 2
    most = 0
    while doors.run.scheduler.has_unfinished_requests():
        doors.run.step()
        most = max(most, doors.slots.use().num_host_copies)
    assert most == 2 and reader.paths == list(names), "each is read once"
    for name in names:
        assert doors.run.outputs[name] == doors.tokens_of(name.upper())


def test_a_request_does_not_wait_for_content_that_another_adapter_has_brought():
    doors = Doors(FakeReader(a="one", b="one", c="two"), max_loras=1, most_copies=1)
    doors.load("a", "a")
    doors.load("c", "c")  # in place of the only copy
    doors.add("first", "c", num_output=8)
    doors.run.step()
    doors.library.read("ticket", "b", 0, "b")  # there is no room while "first" runs
    doors.add("second", "a")
    doors.run.drain()
    assert doors.run.outputs["second"] == doors.tokens_of("one")
    assert doors.library.state("ticket") == digest_of("one")


def test_a_pinned_adapter_keeps_copy_and_slot():
    doors = Doors(FakeReader(a="A", b="B", c="C"), max_loras=2, most_copies=2)
    doors.load("a", "a", 1)
    assert doors.library.pin(1) and not doors.library.pin("none")
    for name in ("a", "b", "c", "b"):
        doors.add(str(len(doors.run.outputs)), name, SOURCE(name))
        doors.run.drain()
    assert doors.slots.slot_of == {digest_of("A"): 0, digest_of("B"): 1}
    with pytest.raises(ConfigError, match=r"1 adapters are pinned, the limit is 1 \(max_loras"):
        doors.library.pin("b")
    doors.library.remove("a")
    assert doors.library.pin("b")


def test_requests_may_be_aborted_while_their_adapter_is_read():
    doors = Doors(FakeReader(a="A", is_slow=True), most_copies=1, max_loras=1)
    doors.add("0", "x", SOURCE("a"))
    doors.add("1", "x", SOURCE("a"))
    doors.run.step()
    doors.run.scheduler.finish_requests("0")
    doors.reader.finish("a")
    doors.run.drain()
    assert doors.run.outputs["1"] == doors.tokens_of("A")
    doors.reader.disk["b"], doors.reader.is_slow = "B", False
    doors.add("2", "y", SOURCE("b"))
    doors.run.drain()
    assert doors.run.outputs["2"] == doors.tokens_of("B"), "the copy of x was let go"


def test_a_refused_request_leaves_its_adapter_to_nobody():
    doors = Doors(FakeReader(a="A", b="B", is_slow=True))
    doors.add("9", "y", SOURCE("b"))
    doors.add("0", None)
    with pytest.raises(RequestError, match="in use"):
        doors.add("0", "x", SOURCE("a"))
    doors.reader.finish("b")
    doors.run.drain()
    doors.add("0", None)
    doors.add("1", "x")
    doors.run.step()
    doors.reader.finish("a")
    doors.run.drain()
    assert doors.run.outputs["0"] == doors.tokens_of(None)
    assert doors.run.outputs["1"] == doors.tokens_of("A")
    assert doors.slots.use().running == doors.slots.use().waiting == {}


def test_a_refused_request_keeps_no_copy_of_its_adapter():
    doors = Doors(FakeReader(a="A", b="B"), 1, most_copies=1)
    doors.load("x", "a")
    with pytest.raises(RequestError, match="max_model_len"):
        doors.add("0", "x", length=5000)
    doors.load("y", "b")
    assert [each["name"] for each in doors.library.listed()] == ["x", "y"]


def test_names_resolve_in_the_directory_of_adapters(tmp_path):
    for name in ("root/x", "root/team/y", "outside"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "adapter_config.json").write_text("{}")
    (tmp_path / "root" / "link").symlink_to(tmp_path / "outside")
    (tmp_path / "root" / "empty").mkdir()
    reader = FakeReader(**{str(tmp_path / "root" / "team" / "y"): "Y"})
    doors = Doors(reader, directory=str(tmp_path / "root"))
    doors.add("0", "team/y")
    doors.run.drain()
    assert doors.run.outputs["0"] == doors.tokens_of("Y")
    assert doors.library.find("x") and doors.library.find("x")["digest"] == ""
    hostile = ("../outside", str(tmp_path / "outside"), "link", "empty", "", ".", "x/..", "a" * 999)
    for name in hostile:
        assert doors.library.find(name) is None
        with pytest.raises(RequestError, match="is not loaded"):
            doors.add("1", name)
    for path in (str(tmp_path / "outside"), "../outside", "link", "/etc", ""):
        with pytest.raises(ConfigError, match="which is not in adapter_dir"):
            doors.library.read("ticket", "z", 0, path, is_confined=True)
    doors.library.read("ticket", "z", 0, "team/y", is_confined=True)
    assert doors.library.state("ticket") == digest_of("Y")


def test_running_and_waiting_requests_are_counted_by_name():
    doors = Doors(FakeReader(a="A", b="B"), max_loras=1)
    for name in ("a", "a", "b"):
        doors.add(str(len(doors.run.outputs)), name, SOURCE(name))
    doors.run.step()
    use = doors.slots.use()
    assert use.running == {"a": 2} and use.waiting == {"b": 1}
    assert (use.num_slots, use.num_slots_used, use.num_host_copies, use.host_bytes) == (
        1,
        1,
        2,
        200,
    )
    doors.run.drain()
    assert doors.slots.use().running == doors.slots.use().waiting == {}


def test_a_recorded_run_with_adapters_is_replayed(tmp_path):
    path, reader = tmp_path / "steps.log", FakeReader(a="A", b="B", is_slow=True)
    slots = slots_of(reader, 1, most_copies=1, waits=True)
    kv = KVManager(100, 4)
    config = SchedulerConfig(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=16)

    def make(clock) -> Scheduler:
        return Scheduler(config, kv, POLICIES["fcfs"](), clock=clock, resources=[slots])

    scheduler = record(path, describe(config, CacheConfig(), kv, 0, max_loras=1), make, float)
    run, worker = [], FeatureWorker(100, 4)
    for name in "abab":
        request = make_request(f"{name}{len(run)}", [7] * 9, 4, adapter=name)
        request = msgspec.structs.replace(request, adapter_source=SOURCE(name))
        scheduler.add_request(slots.resolved(request))
        run.append(scheduler.schedule())
        scheduler.update_from_output(run[-1], worker.collect(worker.launch(run[-1])))
    while not (plan := scheduler.schedule()).is_empty:
        scheduler.update_from_output(plan, worker.collect(worker.launch(plan)))
    scheduler.shutdown()
    outcome = replay(path)
    assert outcome.difference is None and outcome.num_requests == 4


def test_adapters_are_read_in_threads_that_end_with_the_reader():
    begun, go_on = threading.Event(), threading.Event()

    def read(order: Order) -> Copy:
        begun.set()
        assert go_on.wait(WAIT_SECONDS)
        if order.path == "bad":
            raise ConfigError("it is damaged")
        return Copy(order.path)

    before = threading.active_count()
    reader = ThreadedReader(read)
    assert threading.active_count() == before, "none before there is something to read"
    first, bad = (reader.submit(Order(name, name)) for name in ("good", "bad"))
    assert begun.wait(WAIT_SECONDS) and first.poll() is None
    waiting = [reader.submit(Order("later", str(number))) for number in range(3)]
    go_on.set()
    for each in (first, bad, *waiting):
        each.wait()
    assert first.poll() == Copy("good")
    with pytest.raises(ConfigError, match="it is damaged"):
        bad.poll()
    assert [each.poll() for each in waiting] == [Copy("0"), Copy("1"), Copy("2")]
    reader.shutdown()
    until = time.monotonic() + WAIT_SECONDS
    while threading.active_count() > before:
        assert time.monotonic() < until
        time.sleep(0.001)

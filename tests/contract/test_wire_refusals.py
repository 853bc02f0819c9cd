"""What a core and its clients must not take from each other."""

import pytest
from live_core import SizedBuild
from spawned import fake_config
from wire_frames import REQUEST
from wire_samples import frames_of

from engine.core.link import Link, Part
from engine.errors import EngineDeadError, RequestError, WireError
from engine.messages.outputs import CoreOutputs, Finished
from engine.messages.params import SamplingParams
from engine.messages.requests import AddRequest
from engine.messages.wire import Failure, Outputs, Refusal, Submitted


@pytest.mark.parametrize(
    "message",
    [
        Submitted(0, [Refusal(7, Failure("RequestError", "no"))]),
        Outputs(CoreOutputs(["a"], [1], None, 0.0, finished=[Finished(7, "stop")])),
    ],
    ids=["submitted", "outputs"],
)
def test_a_place_that_is_none_is_an_error_of_the_engine(message: Submitted | Outputs) -> None:
    link = Link()
    with pytest.raises((WireError, EngineDeadError)):
        reply = link.feed(frames_of([message]))
        link.take_batches(lambda frame: None)
        if reply is not None:
            link.submitted([REQUEST], Part(b"", 0, [0]), reply)


@pytest.mark.parametrize("wish", [{"adapter": "none-such"}, {"grammar": "root ::= 'a'"}])
def test_a_core_refuses_what_it_cannot_do(wish: dict[str, str]) -> None:
    client = SizedBuild()(fake_config())
    with pytest.raises(RequestError):
        client.add(AddRequest("a", [1], SamplingParams(), 0, 0.0, 4, **wish))

"""What a core and its clients must not take from each other."""

import pytest
from support.live_core import SizedBuild
from support.spawned import fake_config
from support.wire_frames import REQUEST
from support.wire_samples import frames_of

from engine.errors import RequestError, WireError
from engine.messages.params import SamplingParams
from engine.messages.requests import AddRequest, CoreOutputs, Finished
from engine.messages.wire import Failure, Outputs, Refusal, Submitted, ToClient
from engine.rpc.client_protocol import ClientProtocol


@pytest.mark.parametrize(
    "message",
    [
        Submitted(0, 1.5, [Refusal(7, Failure("RequestError", "no"))]),
        Submitted(0, 1.5, [Refusal(-1, Failure("RequestError", "no"))]),
        Outputs(CoreOutputs(["a"], [1], None, 0.0, finished=[Finished(7, "stop")])),
        Outputs(CoreOutputs(["a", "b"], [1], None, 0.0)),
        Outputs(CoreOutputs(["a", "b"], [1, 2, 3], [1, 1], 0.0)),
        Outputs(CoreOutputs(["a", "b"], [1], [1], 0.0)),
        Outputs(CoreOutputs(["a", "b"], [], [1, -1], 0.0)),
    ],
    ids=repr,
)
def test_places_and_counts_that_are_none_are_errors_of_the_engine(message: ToClient) -> None:
    link = ClientProtocol()
    link.submit([REQUEST])
    with pytest.raises(WireError, match="in a message from the core"):
        link.feed(frames_of([message]))


@pytest.mark.parametrize("wish", [{"adapter": "none-such"}, {"grammar": "root ::= 'a'"}])
def test_a_core_refuses_what_it_cannot_do(wish: dict[str, str]) -> None:
    client = SizedBuild()(fake_config())
    with pytest.raises(RequestError):
        client.add(AddRequest("a", [1], SamplingParams(), 0, 0.0, 4, **wish))

"""What sockets keep when one side has gone."""

from pathlib import Path

import zmq

from engine.ipc import sockets
from engine.ipc.sockets import LINGER_MS, SEND_QUEUE, bind, close, connect


def test_a_client_reads_all_that_a_core_said_before_it_ended(tmp_path: Path) -> None:
    """Though it was busy with something else: what there are credits for has room at its side."""
    context: zmq.Context[sockets.Socket] = zmq.Context()
    router = bind(context, f"ipc://{tmp_path}/core", None)
    dealer, lost = connect(context, f"ipc://{tmp_path}/core", None)
    dealer.send(b"hello")
    identity, _ = router.recv_multipart()
    for number in range(SEND_QUEUE // 2):
        router.send_multipart([identity, b"%d" % number + bytes(500)], zmq.NOBLOCK)
    close(router, linger_ms=LINGER_MS)
    assert lost.poll(5000)  # it has gone before anything was read
    for number in range(SEND_QUEUE // 2):
        assert dealer.poll(5000), f"message {number} is lost"
        assert dealer.recv() == b"%d" % number + bytes(500)
    close(dealer, lost)
    context.destroy(linger=0)

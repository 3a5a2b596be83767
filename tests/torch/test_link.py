"""Timing copies, on links that a test makes up."""

from ebbtide.torch.link import NUM_COPIES, AbstractTrial, Way, time_copies

NUM_BYTES = 2_000_000


class Uplink:
    """What GPUs share: each copy takes as long as all that run at once."""

    def __init__(self) -> None:
        self.num_running = 0


class Trial(AbstractTrial):
    """A GPU whose first copy takes long, as a driver sets things up."""

    def __init__(self, uplink: Uplink) -> None:
        self._uplink = uplink
        self._sharing = 0
        self.calls: list[str] = []

    @property
    def num_bytes(self) -> int:
        return NUM_BYTES

    def settle(self) -> None:
        self.calls.append("settle")
        self._uplink.num_running = 0

    def start(self, way: Way) -> None:
        self.calls.append(way.value)
        self._uplink.num_running += 1

    def finish_s(self) -> float:
        self.calls.append("finish")
        is_first = self.calls.count("finish") == 1
        return 100.0 if is_first else 0.001 * self._uplink.num_running


def test_the_first_copy_does_not_count() -> None:
    trial = Trial(Uplink())
    assert time_copies([trial], Way.OUT) == [NUM_BYTES * 1000]
    assert trial.calls == ["settle", "settle", "out", "finish"] * (1 + NUM_COPIES)


def test_gpus_that_copy_at_once_share_their_uplink() -> None:
    uplink = Uplink()
    trials = [Trial(uplink), Trial(uplink)]
    assert time_copies(trials, Way.BOTH) == [NUM_BYTES * 500, NUM_BYTES * 500]


def test_others_are_waited_for_before_and_the_link_is_seen_while_copies_run() -> None:
    uplink = Uplink()
    seen: list[int] = []
    waited: list[int] = []
    time_copies(
        [Trial(uplink)],
        Way.IN,
        wait_for_others=lambda: waited.append(uplink.num_running),
        while_copying=lambda: seen.append(uplink.num_running),
    )
    assert (waited, seen) == ([0] * (1 + NUM_COPIES), [1] * (1 + NUM_COPIES))

"""A state is whole before it is in place: what the slowest process writes is in it."""

import threading
import time
from pathlib import Path

import pytest

from distill.state import PROGRESS, Progress, save


class Rank:
    """One of several processes, here a thread: each writes a file of its own, one of them late."""

    def __init__(self, number: int, barrier: threading.Barrier, late: int) -> None:
        self.number, self.barrier, self.late = number, barrier, late

    @property
    def is_main_process(self) -> bool:
        return self.number == 0

    def wait_for_everyone(self) -> None:
        self.barrier.wait(timeout=10)

    def save_state(self, folder: str) -> None:
        Path(folder).mkdir(exist_ok=True)
        time.sleep(0.2 * (self.number == self.late))
        (Path(folder) / f"random_states_{self.number}.pkl").touch()


@pytest.mark.parametrize("late", [0, 1])
def test_a_state_waits_for_the_slowest_process(tmp_path, late):
    barrier = threading.Barrier(2)
    ranks = [Rank(number, barrier, late) for number in range(2)]
    (tmp_path / "state-000001").mkdir()
    threads = [threading.Thread(target=save, args=(rank, tmp_path, Progress(step=2))) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    (state,) = tmp_path.iterdir()
    assert state.name == "state-000002"
    assert {file.name for file in state.iterdir()} == {"random_states_0.pkl", "random_states_1.pkl", PROGRESS}

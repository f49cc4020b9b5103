"""Forward passes that pause in front of a layer, so that the layer can be changed before they go on.

Calibrating layer by layer needs the inputs of a layer after everything before it was quantized. Running the block anew
for every layer costs a forward pass each; running it once and quantizing all layers on the same pass shows each layer
inputs that it will never see again. Here every batch is a forward pass of its own that stops where the next group of
layers begins and resumes, with the new weights in place, when all batches have been there: one forward pass in all, and
every layer is calibrated on its true inputs.

A paused pass is a Python thread that waits; a baton makes sure that only one of them ever runs, so that the order of
events is as fixed as in a loop. The price is memory: the intermediate activations of all batches are alive at once.
"""

from collections.abc import Callable, Hashable
from threading import Semaphore, Thread

from torch import Tensor

__all__ = ["PausedPass"]


class _Abandoned(BaseException):
    """Unwinds a pass that nobody will resume; not an error, so that no handler on its way stops it."""


class PausedPass:
    """One call that runs in turns: until it pauses, then until the next time, until it returns."""

    def __init__(self, function: Callable[["PausedPass"], Tensor]) -> None:
        self.at: Hashable | None = None  # where it waits; None before it starts and once it has ended
        self.ended = False
        self._shown: Tensor | None = None
        self._result: Tensor | None = None
        self._function = function
        self._error: Exception | None = None
        self._abandoned = False
        self._go, self._back = Semaphore(0), Semaphore(0)
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def resume(self) -> None:
        """Run to the next pause or to the end; an error of the pass is raised here."""
        self._go.release()
        self._back.acquire()
        if self._error is not None:
            raise self._error

    def shown(self) -> Tensor:
        """The tensor at which it is paused."""
        if self._shown is None:
            raise ValueError("the pass is not paused")
        return self._shown

    def take(self) -> Tensor:
        """What the ended pass returned; it is let go."""
        result, self._result = self._result, None
        if result is None:
            raise ValueError("the pass has not ended, or its result was taken")
        return result

    def pause(self, at: Hashable, tensor: Tensor) -> None:
        """Called from inside the pass: hand control back and wait."""
        self.at, self._shown = at, tensor
        self._back.release()
        self._go.acquire()
        self.at = self._shown = None
        if self._abandoned:
            raise _Abandoned

    def abandon(self) -> None:
        """End a pass that is paused or was never started; one that has ended stays as it is."""
        self._abandoned = True
        self._go.release()
        self._thread.join()

    def _run(self) -> None:
        self._go.acquire()
        try:
            if not self._abandoned:
                self._result = self._function(self)
        except _Abandoned:
            pass
        except Exception as error:  # noqa: BLE001 - raised again by resume(), in the thread that waits for it
            self._error = error
        self.ended = True
        self._back.release()

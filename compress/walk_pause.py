"""Forward passes that pause in front of a layer, so that the layer can be changed before they go on.

Calibrating layer by layer needs the inputs of a layer after everything before it was quantized. Running the block anew
for every layer costs a forward pass each; running it once and quantizing all layers on the same pass shows each layer
inputs that it will never see again. Here every batch is a forward pass of its own that stops where the next group of
layers begins and resumes, with the new weights in place, when all batches have been there: one forward pass in all, and
every layer is calibrated on its true inputs.

A paused pass is a greenlet, a call stack that is put aside: all passes run in one thread, one after the other, in an
order as fixed as that of a loop, and share its memory pools. The price is memory: the intermediate activations of all
batches are alive at once. What torch keeps by thread, such as whether gradients are on, is the caller's to set, and
a pass must not pause inside a setting of its own, such as autocast.
"""

from collections.abc import Callable, Hashable

from greenlet import GreenletExit, getcurrent, greenlet
from torch import Tensor

__all__ = ["PausedPass"]


class PausedPass:
    """One call that runs in turns: until it pauses, then until the next time, until it returns."""

    def __init__(self, function: Callable[[], Tensor]) -> None:
        self.at: Hashable | None = None  # where it waits; None before it starts and once it has ended
        self._shown: Tensor | None = None
        self._result: Tensor | None = None
        self._stack = greenlet(function)

    @property
    def ended(self) -> bool:
        """It has returned, failed or been abandoned."""
        return bool(self._stack.dead)

    def resume(self) -> None:
        """Run to the next pause or to the end; an error of the pass is raised here."""
        result = self._stack.switch()
        if self.ended:
            self._result = result

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
        """Called from inside the pass: hand control back and wait.

        Raises:
            RuntimeError: called from elsewhere.
        """
        if getcurrent() is not self._stack:
            raise RuntimeError("a block whose passes are paused cannot be run")
        self.at, self._shown = at, tensor
        try:
            self._stack.parent.switch()
        finally:
            self.at = self._shown = None

    def abandon(self) -> None:
        """End a pass that is paused or was never started; one that has ended stays as it is."""
        if not self.ended:
            self._stack.throw(GreenletExit)

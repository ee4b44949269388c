"""StepOutcomes: what one step did for its requests, as rows and as columns."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tokenyard.interfaces.policy import StepOutcome

if TYPE_CHECKING:
    from tokenyard.arrays import BoolArray, IntArray, LongArray
    from tokenyard.interfaces.policy import RequestView


class StepOutcomes(Sequence[StepOutcome]):
    """What `SchedulingPolicy.on_step` is given: a sequence of StepOutcome (since API 1.7).

    A row is made when it is read, which costs about a microsecond; the columns below cost next to nothing, however many
    requests run. R = rows, in the order of the step. Columns are read-only.
    """

    @property
    @abstractmethod
    def requests(self) -> Sequence[RequestView]:
        """[R]"""

    @property
    @abstractmethod
    def num_computed_tokens(self) -> IntArray:
        """[R]"""

    @property
    @abstractmethod
    def num_new_tokens(self) -> IntArray:
        """[R] delivered by the step."""

    @property
    @abstractmethod
    def is_first_token(self) -> BoolArray:
        """[R] it delivered some, and none before."""

    @property
    @abstractmethod
    def is_finished(self) -> BoolArray:
        """[R]"""

    @abstractmethod
    def sum_by_client(self, values: IntArray | LongArray) -> Mapping[str | None, int]:
        """Sums of `values` [R] over each client's rows. None = all requests without a client id."""

    @abstractmethod
    def sum_by_session(self, values: IntArray | LongArray) -> Mapping[tuple[str | None, str], int]:
        """The same by client and session; requests without a session id are left out."""

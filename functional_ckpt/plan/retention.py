"""Steps of a run as values, and rules that keep some of them: `KeepLast`, `KeepEvery`, `KeepBest`, joined by ``|``."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Literal, Protocol, TypeAlias, get_args, runtime_checkable

import attrs

from functional_ckpt.errors import PolicyError
from functional_ckpt.plan.field import as_int, at_least, one_of, refuse, short_repr

__all__ = [
    "STEP",
    "Keep",
    "KeepAny",
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "StepInfo",
    "best_of",
    "metrics_of",
    "needs_metrics",
    "step_attributes",
    "steps_to_remove",
]

#: The attribute of a checkpoint's root that holds the number and metrics of its step.
STEP = "functional_ckpt_step"

_BY_STEP = attrgetter("step")

Mode: TypeAlias = Literal["min", "max"]


def _pairs(metrics: Mapping[str, float] | Iterable[tuple[str, float]]) -> tuple[tuple[str, float], ...]:
    return tuple(metrics.items()) if isinstance(metrics, Mapping) else tuple(metrics)


def _text(attributes: Mapping[str, Any] | str) -> str:
    return attributes if isinstance(attributes, str) else json.dumps(dict(attributes))


@attrs.frozen(repr=False)
class StepInfo:
    """A committed step: `time` in seconds since 1970, `nbytes` of its elements; None if the checkpoint lacks them.

    Examples
    --------
    >>> info = StepInfo(10, "run/step-00000010", metrics={"loss": 0.5}, attributes={"git": "1f2e"})
    >>> info.metrics, info.attributes, info.pinned
    ({'loss': 0.5}, {'git': '1f2e'}, False)
    >>> info
    StepInfo(10, 'run/step-00000010', metrics={'loss': 0.5}, attributes={'git': '1f2e'})
    """

    step: int
    path: str
    time: float | None = None
    nbytes: int | None = None
    # As text and pairs, so that the value can be hashed.
    _metrics: tuple[tuple[str, float], ...] = attrs.field(default=(), converter=_pairs)
    _attributes: str = attrs.field(default="{}", converter=_text)
    pinned: bool = False

    def __repr__(self) -> str:
        names = ("time", "nbytes", "metrics", "attributes", "pinned")
        told = "".join(f", {name}={value!r}" for name in names if (value := getattr(self, name)))
        return f"StepInfo({self.step}, {self.path!r}{told})"

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics that were saved with the step, by name."""
        return dict(self._metrics)

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes that were passed to the save."""
        found: dict[str, Any] = json.loads(self._attributes)
        return found


@runtime_checkable
class Keep(Protocol):
    """A rule of retention: which of the given steps, ascending, it keeps. The latest step is always kept.

    The result must not depend on steps that are not kept, so that an interrupted removal can be repeated.
    """

    def kept(self, steps: Sequence[StepInfo]) -> frozenset[int]:
        """Return the numbers of the steps to keep."""


@attrs.frozen
class KeepAny:
    """Keeps the steps that any of `rules` keeps.

    Examples
    --------
    >>> steps = [StepInfo(step, "") for step in (10, 20, 30, 40)]
    >>> sorted((KeepLast(1) | KeepEvery(20)).kept(steps))
    [20, 40]
    """

    rules: tuple[Keep, ...]

    def kept(self, steps: Sequence[StepInfo]) -> frozenset[int]:
        """Return the numbers of the steps to keep."""
        return frozenset().union(*(rule.kept(steps) for rule in self.rules))

    def __or__(self, other: Keep) -> "KeepAny":
        """Return a rule that keeps what either keeps."""
        return _either(self, other)


def _either(one: Keep, other: Keep) -> KeepAny:
    if not isinstance(other, Keep):
        raise refuse(one, "other rule", "KeepLast, KeepEvery, KeepBest or another Keep", other)
    rules = [rule.rules if isinstance(rule, KeepAny) else (rule,) for rule in (one, other)]
    return KeepAny((*rules[0], *rules[1]))


@attrs.frozen
class KeepLast:
    """Keeps the last `n` steps.

    Examples
    --------
    >>> steps_to_remove([StepInfo(step, "") for step in (10, 20, 30)], KeepLast(2))
    (10,)
    """

    n: int = attrs.field(converter=as_int, validator=at_least(1))

    def kept(self, steps: Sequence[StepInfo]) -> frozenset[int]:
        """Return the numbers of the last `n`."""
        return frozenset(info.step for info in steps[-self.n :])

    def __or__(self, other: Keep) -> KeepAny:
        """Return a rule that keeps what either keeps."""
        return _either(self, other)


@attrs.frozen
class KeepEvery:
    """Keeps one step of every `n_steps`: each multiple; where that was not saved, the last one before it.

    Examples
    --------
    >>> steps_to_remove([StepInfo(step, "") for step in (50, 100, 150, 190, 250)], KeepEvery(100))
    (50, 150)
    """

    n_steps: int = attrs.field(converter=as_int, validator=at_least(1))

    def kept(self, steps: Sequence[StepInfo]) -> frozenset[int]:
        """Return the number of the last step of each stretch that ends at a multiple."""
        n = self.n_steps
        return frozenset({-(-info.step // n): info.step for info in steps}.values())

    def __or__(self, other: Keep) -> KeepAny:
        """Return a rule that keeps what either keeps."""
        return _either(self, other)


@attrs.frozen
class KeepBest:
    """Keeps the `n` steps with the lowest (``"min"``) or highest (``"max"``) `metric`; of equal ones the later.

    Steps without the metric, or where it is not a number (NaN), are not among the best.

    Examples
    --------
    >>> steps = [StepInfo(10, "", metrics={"loss": 0.1}), StepInfo(20, "", metrics={"loss": 0.3}), StepInfo(30, "")]
    >>> steps_to_remove(steps, KeepBest("loss"))
    (20,)
    """

    metric: str = attrs.field()
    n: int = attrs.field(default=1, converter=as_int, validator=at_least(1))
    mode: Mode = attrs.field(default="min", validator=one_of(*get_args(Mode)))

    @metric.validator
    def _check_metric(self, field: Any, value: Any) -> None:
        if not isinstance(value, str):
            raise refuse(self, field.name, "the name of a metric", value)

    def kept(self, steps: Sequence[StepInfo]) -> frozenset[int]:
        """Return the numbers of the best."""
        sign = -1.0 if self.mode == "max" else 1.0
        found = [(sign * value, -info.step) for info in steps if not math.isnan(value := _value(info, self.metric))]
        return frozenset(-step for _, step in sorted(found)[: self.n])

    def __or__(self, other: Keep) -> KeepAny:
        """Return a rule that keeps what either keeps."""
        return _either(self, other)


def _value(info: StepInfo, metric: str) -> float:
    return info.metrics.get(metric, math.nan)


def steps_to_remove(steps: Sequence[StepInfo], keep: Keep | None) -> tuple[int, ...]:
    """Return the committed steps to remove, in the order of removal: ascending.

    The latest step, pinned steps, and the steps that `keep` keeps are not removed; None keeps everything.

    Examples
    --------
    >>> steps = [StepInfo(1, "", pinned=True), StepInfo(2, ""), StepInfo(3, ""), StepInfo(4, "")]
    >>> steps_to_remove(steps, KeepLast(1))
    (2, 3)
    """
    if keep is None or not steps:
        return ()
    ordered = sorted(steps, key=_BY_STEP)
    stays = {*keep.kept(ordered), ordered[-1].step, *(info.step for info in ordered if info.pinned)}
    return tuple(info.step for info in ordered if info.step not in stays)


def needs_metrics(keep: Keep | None) -> bool:
    """Tell whether a rule decides by more than the numbers of steps.

    Examples
    --------
    >>> needs_metrics(KeepLast(3) | KeepEvery(100)), needs_metrics(KeepLast(3) | KeepBest("loss"))
    (False, True)
    """
    if isinstance(keep, KeepAny):
        return any(map(needs_metrics, keep.rules))
    return not isinstance(keep, KeepLast | KeepEvery | None)


def best_of(steps: Sequence[StepInfo], metric: str, mode: Mode = "min") -> int | None:
    """Return the step with the lowest or highest `metric`; None if no step has it.

    Examples
    --------
    >>> best_of([StepInfo(1, "", metrics={"loss": 0.2}), StepInfo(2, "", metrics={"loss": 0.4})], "loss")
    1
    """
    return next(iter(KeepBest(metric, 1, mode).kept(steps)), None)


def step_attributes(step: int, metrics: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the attribute with the number and metrics of a step; numbers that JSON lacks are text in it.

    Raises
    ------
    PolicyError
        For metrics that are not numbers by name.

    Examples
    --------
    >>> step_attributes(3, {"loss": float("inf")})
    {'functional_ckpt_step': {'step': 3, 'metrics': {'loss': 'inf'}}}
    """
    if metrics is not None and not isinstance(metrics, Mapping):
        raise refuse("save", "metrics", "a dict of numbers by name", metrics)
    found = {name: _number(name, value) for name, value in (metrics or {}).items()}
    return {STEP: {"step": step, "metrics": {n: v if math.isfinite(v) else repr(v) for n, v in found.items()}}}


def _number(name: object, value: Any) -> float:
    try:
        number = None if isinstance(value, str | bytes) else float(value)  # also of a tensor, or a numpy scalar
    except (TypeError, ValueError, RuntimeError, OverflowError):
        number = None
    if number is None or not isinstance(name, str):
        found = f"{short_repr(name)}: {short_repr(value)}"
        raise PolicyError(
            "a metric must be a number with a name",
            expected="a name and a number",
            found=found,
            remedy="Pass other facts as attributes",
        )
    return number


def metrics_of(attributes: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics in the attributes of a checkpoint's root; none if it was not saved as a step.

    Examples
    --------
    >>> metrics_of(step_attributes(3, {"loss": 2, "grad": float("inf")})), metrics_of({"functional_ckpt_step": 3})
    ({'loss': 2.0, 'grad': inf}, {})
    """
    ours = attributes.get(STEP)
    metrics = ours.get("metrics") if isinstance(ours, Mapping) else None
    found: dict[str, float] = {}
    for name, value in metrics.items() if isinstance(metrics, Mapping) else ():
        try:
            found[str(name)] = float(value)
        except (TypeError, ValueError, OverflowError):
            continue  # not written by a save: ignored
    return found

"""`compress plan`: every weight format with every KV format on one kind of GPU, and the cheapest that does the job.

Cheapest means fewest GPUs: tensor-parallel size times copies. Among equals, what holds the users even if the engine
takes the most memory it has been seen to take; then the gentlest: the weights as they are, else those that keep most
bytes, then the KV cache that keeps most bits, because less compression is less loss.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, floor

from compress.errors import InputError
from compress.planner.assumptions import assumptions
from compress.planner.band import Band
from compress.planner.engine import Engine, Limits, find_engine, limits, room, room_from_log
from compress.planner.enginelog import EngineLog, parse_log
from compress.planner.formats import KV_FORMATS, WEIGHT_FORMATS, KvFormat
from compress.planner.gpus import Gpu, find_gpu
from compress.planner.kv import last_true, layout
from compress.planner.model import Model, load_model
from compress.planner.options import Ask, nearest, parse_options
from compress.planner.roofline import Speed, speed
from compress.planner.weights import STORED, loaded, on_gpu

__all__ = ["Choice", "PlanReport", "PlanRow", "Setting", "evaluate", "plan", "run_plan", "setting"]

FORMATS = ("bf16", "fp8", "mxfp4", "int4")
TENSOR_PARALLEL = (1, 2, 4, 8)


@dataclass(frozen=True)
class Setting:
    """Everything a row depends on besides its formats and tensor parallelism."""

    model: Model
    ask: Ask
    gpu: Gpu
    engine: Engine
    limit: Limits
    log: EngineLog | None

    @property
    def answer(self) -> int:
        """Tokens of an answer."""
        return self.ask.output or max(1, self.ask.context // 8)

    @property
    def prompt(self) -> int:
        """Tokens of a prompt."""
        return self.ask.context - self.answer


@dataclass(frozen=True)
class PlanRow:
    """One weight format with one KV format on `tp` GPUs; bytes and counts of one GPU unless said.

    weights       bytes of all weights, over all GPUs
    weights_gpu   bytes of weights
    kv_token      bytes one more token of a long request costs
    kv_user       bytes of a request of the asked context
    room          bytes left for the KV cache; negative: the model does not fit
    users         requests of the asked context held at the same time
    context       longest context the asked users can have at the same time
    speed         with the asked users, or as many as fit; None if none does
    served        users that fit (best guess) and get every target met
    """

    weight_format: str
    kv_format: str
    tp: int
    weights: int
    weights_gpu: Band
    kv_token: int
    kv_user: int
    room: Band
    users: Band
    context: Band
    speed: Speed | None
    served: int


@dataclass(frozen=True)
class Choice:
    """The cheapest way to serve everybody: `copies` of a row's model, `gpus` in all."""

    row: PlanRow
    copies: int
    gpus: int
    certain: bool  # also if the engine takes the most memory it has been seen to take


@dataclass(frozen=True)
class PlanReport:
    """The answer: rows at one tensor-parallel size, the cheapest choice over all tried, and what was assumed."""

    setting: Setting
    tp: int
    rows: tuple[PlanRow, ...]
    choice: Choice | None
    assumptions: tuple[str, ...]


def run_plan(model: str, options: Mapping[str, str]) -> PlanReport:
    """Plan from the command line's words.

    Args:
        model: a directory, a config.json, or a hub id.
        options: see `options.Ask`; `gpu`, `users` and `context` are needed.

    Raises:
        InputError: an option or a model that cannot be used.
    """
    ask = parse_options(options)
    find_gpu(ask.gpu)  # a misspelt name is told before the hub is asked
    find_engine(ask.engine)
    log = parse_log(ask.log) if ask.log is not None else None
    _check_names("format", ask.formats, [STORED, *WEIGHT_FORMATS])
    _check_names("KV format", ask.kv, list(KV_FORMATS))
    return plan(setting(load_model(model), ask, log))


def _check_names(what: str, names: tuple[str, ...], known: list[str]) -> None:
    for name in names:
        if name not in known:
            raise nearest(what, name, known)


def setting(model: Model, ask: Ask, log: EngineLog | None = None) -> Setting:
    """Look up the GPU and the engine of a question.

    Raises:
        InputError: unknown names, or a context longer than the model's positions.
    """
    longest = model.get("max_position_embeddings")
    if longest and ask.context > longest:
        raise InputError(f"context={ask.context} is longer than the {longest} positions of {model.name}: shorten it")
    gpu, engine = find_gpu(ask.gpu), find_engine(ask.engine)
    return Setting(model, ask, gpu, engine, limits(ask, engine, gpu), log)


def plan(given: Setting) -> PlanReport:
    """Evaluate every pair of formats and choose.

    Raises:
        InputError: no engine stores this model's cache in any KV format asked for.
    """
    tp = given.ask.tp or 1
    sizes = (tp,) if given.ask.tp or given.log else _divisors(given.model)
    tried = [row for size in sizes for row in _rows(given, size)]
    rows = tuple(row for row in tried if row.tp == tp)
    if not rows:
        raise InputError(
            f"no engine keeps the latent cache of {given.model.name} as {', '.join(given.ask.kv)}: use bf16"
        )
    return PlanReport(given, tp, rows, _cheapest(given, tried), assumptions(given, tp))


def _divisors(model: Model) -> tuple[int, ...]:
    heads = model.get("num_attention_heads", default=1)
    return tuple(size for size in TENSOR_PARALLEL if heads % size == 0)


def _rows(given: Setting, tp: int) -> list[PlanRow]:
    default = (STORED, *FORMATS) if given.model.quantized else FORMATS
    pairs = [(fmt, kv) for fmt in given.ask.formats or default for kv in given.ask.kv]
    rows = (evaluate(given, fmt, KV_FORMATS[kv], tp) for fmt, kv in pairs)
    return [row for row in rows if row is not None]


def evaluate(given: Setting, fmt: str, kv: KvFormat, tp: int) -> PlanRow | None:
    """One row; None where no engine stores the model's cache in this KV format."""
    cache = layout(given.model, kv, tp, in_flight=given.limit.batched)
    if cache is None:
        return None
    ask, weights = given.ask, on_gpu(given.model, fmt, tp)
    left = _room(given, fmt, weights, tp)
    users = left.rising(lambda room: cache.users(room, ask.context))
    longest = given.model.get("max_position_embeddings", default=2**20)
    context = left.rising(lambda room: cache.context(room, ask.users, longest))
    batch = min(ask.users, floor(users.best), given.limit.seqs)
    return PlanRow(
        weight_format=fmt,
        kv_format=kv.name,
        tp=tp,
        weights=loaded(given.model, fmt),
        weights_gpu=weights,
        kv_token=cache.token_bytes,
        kv_user=cache.request_bytes(ask.context),
        room=left,
        users=users,
        context=context,
        speed=_speed(given, fmt, kv, tp, batch) if batch else None,
        served=_served(given, fmt, kv, tp, floor(users.best)),
    )


def _room(given: Setting, fmt: str, weights: Band, tp: int) -> Band:
    if given.log is None:
        return room(given.model, weights, given.engine, gpu=given.gpu, limit=given.limit, tp=tp)
    logged = layout(given.model, KV_FORMATS["bf16"], tp, in_flight=given.limit.batched)
    assert logged is not None  # 16 bits are always stored
    return room_from_log(given.log, logged, on_gpu(given.model, given.model.own_format, tp).best, weights.best)


def _speed(given: Setting, fmt: str, kv: KvFormat, tp: int, users: int) -> Speed:
    return speed(given.model, fmt, kv, gpu=given.gpu, tp=tp, load=(users, given.prompt, given.answer))


def _served(given: Setting, fmt: str, kv: KvFormat, tp: int, held: int) -> int:
    """Most users, of those held, for whom the best guesses of TTFT and TPOT are within the targets."""

    def meets(users: int) -> bool:
        found = _speed(given, fmt, kv, tp, users)
        limits_and_values = ((given.ask.ttft, found.ttft.best), (given.ask.tpot, found.tpot.best))
        return all(limit is None or value <= limit for limit, value in limits_and_values)

    return last_true(meets, min(held, given.limit.seqs))


def _cheapest(given: Setting, rows: list[PlanRow]) -> Choice | None:
    able = [_choice(row, given.ask.users) for row in rows if row.served]
    return min(able, key=lambda choice: _cost(choice, given.model.own_format)) if able else None


def _choice(row: PlanRow, users: int) -> Choice:
    copies = ceil(users / row.served)
    return Choice(row, copies, row.tp * copies, row.users.low * copies >= users)


def _cost(choice: Choice, own: str) -> tuple[int, bool, bool, int, float]:
    row = choice.row
    changed = row.weight_format != own
    return choice.gpus, not choice.certain, changed, -row.weights, -KV_FORMATS[row.kv_format].bits

"""`generate` in steps: one step computes a token and chooses it, and on a GPU one CUDA graph is a step.

    host     load state ──▶ launch ─▶ launch ─▶ launch ─▶ ...   (checks now and then whether all have ended)
    GPU                      token     token     token

A step reads a token, computes its logits, applies transformers' own processors to them, chooses the next
token, and writes all of it where the next step reads it: keys and values into the cache, the token into the
sequence. On a CPU, this saves what transformers' loop does between two tokens (5.22): 1.1 to
1.3 ms on an x86 processor.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation import logits_process, stopping_criteria
from transformers.generation.utils import GENERATION_MODES_MAPPING

from intarsia.engines.triton_kernels.operators import has_triton
from intarsia.errors import InputError
from intarsia.generation.forward import GeneratingForward
from intarsia.generation.storage import append_to, stack_of
from intarsia.runtime.compiled import Compiled
from intarsia.runtime.cuda_graphs import CudaGraphs, captured

# Processors that compute with tensors alone, so that a CUDA graph can contain them.
PROCESSORS = (
    logits_process.TemperatureLogitsWarper,
    logits_process.TopKLogitsWarper,
    logits_process.TopPLogitsWarper,
    logits_process.MinPLogitsWarper,
    logits_process.RepetitionPenaltyLogitsProcessor,
)
# Arguments of `generate` that are supported here. A call with others uses transformers' own loop.
ARGUMENTS = frozenset(
    {
        *("inputs", "input_ids", "attention_mask", "generation_config", "past_key_values", "use_cache"),
        *("max_new_tokens", "max_length", "min_length", "eos_token_id", "pad_token_id", "bos_token_id"),
        *("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"),
        *("num_return_sequences", "num_beams", "renormalize_logits"),
    }
)
_MODEL_ARGUMENTS = (
    "attention_mask",
    "past_key_values",
    "use_cache",
    "position_ids",
    "logits_to_keep",
    "cache_position",
)
_MODES = ("greedy_search", "sample")
_LOOK = 8  # steps between two checks whether all rows have ended
_AHEAD = 2  # checks under way before the host waits
_LIKELIEST = 1024  # the largest `top_k` that one program of the kernel holds
_MOST_STEPS = 8  # recorded steps, one for each way of choosing tokens

State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Choice:
    """How the next token is chosen, and when a row ends."""

    processors: tuple[Any, ...]
    samples: bool
    ends: tuple[int, ...]
    padding: int

    @property
    def key(self) -> Any:
        """Equal for choices that one graph can compute."""
        described = tuple((type(one), tuple(sorted(map(repr, vars(one).items())))) for one in self.processors)
        return described, self.samples, self.ends, self.padding

    @functools.cached_property
    def likeliest(self) -> tuple[int, float] | None:
        """`top_k` and `top_p` if they are the last processors; None for any other way to sample."""
        kinds = [type(one) for one in self.processors]
        if not self.samples or logits_process.TopKLogitsWarper not in kinds[-2:]:
            return None
        place = kinds.index(logits_process.TopKLogitsWarper)
        top_k, *rest = self.processors[place:]
        if not rest:
            return (top_k.top_k, 1.0) if top_k.top_k <= _LIKELIEST else None
        is_plain = kinds[-1] is logits_process.TopPLogitsWarper and rest[0].min_tokens_to_keep == 1
        return (top_k.top_k, rest[0].top_p) if is_plain and top_k.top_k <= _LIKELIEST else None

    def tokens(self, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """The next token of each row."""
        likeliest = self.likeliest if has_triton(logits) else None
        scores = logits
        for processor in self.processors:
            if likeliest is not None and type(processor) is logits_process.TopKLogitsWarper:
                from intarsia.engines.triton_kernels.sampling import drawn_tokens

                return drawn_tokens(scores, *likeliest)
            scores = processor(ids, scores)
        if not self.samples:
            return scores.argmax(-1)
        shares = torch.softmax(scores, -1)
        # As `torch.multinomial` for one sample, without its check of the values.
        return (shares / torch.empty_like(shares).exponential_(1)).argmax(-1)


class Step:
    """The computation of one token for each row: its inputs and outputs, and on a GPU its CUDA graph."""

    def __init__(self, forward: GeneratingForward, rows: int, choice: Choice) -> None:
        anatomy, room = forward.anatomy, forward.room
        program = forward.by_rows[rows].token
        long: dict[str, Any] = {"dtype": torch.long, "device": anatomy.device}
        self.state: State = {
            "ids": torch.zeros(rows, 1, **long),
            "positions": torch.zeros(rows, 1, **long),
            "mask": torch.zeros(rows, 1, 1, room + 1, dtype=torch.bool, device=anatomy.device),
            "place": torch.zeros(1, **long),  # position of the token in the cache
            "tokens": torch.zeros(rows, room + 1, **long),
            "unfinished": torch.ones(rows, dtype=torch.bool, device=anatomy.device),
            "goes_on": torch.ones((), dtype=torch.bool, device=anatomy.device),
            "steps": torch.zeros((), **long),  # the number of steps before all rows had ended
        }
        layers = anatomy.empty(rows, room)
        self.memory: torch.Tensor = torch.stack([tensor for pair in layers for tensor in pair])
        self._program, self._choice, self._stacked = program, choice, anatomy.stacked
        self._ends = torch.tensor(choice.ends, **long)
        self._graph: torch.cuda.CUDAGraph | None = None
        if anatomy.device.type == "cuda":
            self._record(anatomy.device)

    def __call__(self) -> None:
        """Compute one token for each row."""
        if self._graph is None:
            self._run()
        else:
            self._graph.replay()

    def _run(self) -> None:
        state = self.state
        memory = [self.memory] if self._stacked else list(self.memory.unbind())
        logits, slices = self._program(state["ids"], state["positions"], state["mask"], *memory)
        state["steps"].add_(state["goes_on"])
        self.memory.index_copy_(-2, state["place"], slices)
        state["mask"].index_fill_(3, state["place"], True)
        tokens = self._choice.tokens(state["tokens"], logits[:, -1].float())
        if self._choice.ends:
            tokens = torch.where(state["unfinished"], tokens, self._choice.padding)
            state["unfinished"].logical_and_(~torch.isin(tokens, self._ends))
            state["goes_on"].copy_(state["unfinished"].any())
        state["place"].add_(1)
        state["positions"].add_(1)
        state["ids"].copy_(tokens[:, None])
        state["tokens"].index_copy_(1, state["place"], tokens[:, None])

    def _record(self, device: torch.device) -> None:
        random_state = torch.cuda.get_rng_state(device)
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):  # libraries initialize themselves and choose their kernels
            self._run()
        torch.cuda.synchronize(device)
        self._graph, _ = captured(self._run, stream, torch.cuda.graph_pool_handle())
        torch.cuda.set_rng_state(random_state, device)


class LoopedGenerate:
    """A model's `generate`, in steps for greedy search and sampling.

    transformers computes the prompt and the first token. It also computes everything else: beams, streamers,
    assistants, the user's own processors and criteria, scores and states in the output, other caches.
    """

    def __init__(self, forward: GeneratingForward) -> None:
        self.forward: GeneratingForward = forward
        self.model: torch.nn.Module = forward.module
        self.own: Callable[..., Any] = self.model.generate  # type: ignore[assignment]
        functools.update_wrapper(self, self.own, updated=())
        self._steps: dict[Any, Step] = {}
        self._lock = threading.Lock()
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        named = {name for name, value in kwargs.items() if value is not None}
        if len(args) > 1 or not named <= ARGUMENTS or not self.forward.enabled:
            return self.own(*args, **kwargs)
        return self.own(*args, **kwargs, custom_generate=self._decode)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the model has its own `generate`."""
        return getattr, (self.model, "generate")

    def _decode(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Any:
        mode = generation_config.get_generation_mode()
        method = getattr(type(model), GENERATION_MODES_MAPPING[mode])

        def own(ids: torch.Tensor, criteria: Any) -> Any:
            return method(
                model,
                ids,
                logits_processor=logits_processor,
                stopping_criteria=criteria,
                generation_config=generation_config,
                **model_kwargs,
            )

        choice = self._choice(mode, logits_processor, stopping_criteria, generation_config)
        mask, cache = model_kwargs.get("attention_mask"), model_kwargs.get("past_key_values")
        last = max(one.max_length for one in stopping_criteria if hasattr(one, "max_length"))
        rows, length = input_ids.shape
        is_whole = mask is None or tuple(mask.shape) == (rows, length)
        fits = last <= self.forward.max_length and rows in self.forward.by_rows and is_whole
        others = [
            name for name, value in model_kwargs.items() if name not in _MODEL_ARGUMENTS and value is not None
        ]
        # The first token would be the model's own, such as in training, and all others the programs'.
        if choice is None or not fits or others or not self.forward.uses_programs():
            return own(input_ids, stopping_criteria)
        if not self._takes(cache, rows):
            return own(input_ids, stopping_criteria)
        if not self._lock.acquire(blocking=False):  # another thread uses the graph's memory
            return own(input_ids, stopping_criteria)
        try:
            ids = own(input_ids, _stop_at(length + 1))
            return self._loop(ids, mask, cache, choice, last - length - 1)
        finally:
            self._lock.release()

    def _takes(self, cache: Any, rows: int) -> bool:
        """Whether steps can use a cache; the forward says in a warning why it does not take it."""
        try:
            self.forward.layers_of(cache, rows)
        except InputError:
            return False
        return True

    def _choice(self, mode: Any, processors: Any, criteria: Any, config: Any) -> Choice | None:
        """How tokens are chosen; None if a step cannot do so."""
        kinds = (stopping_criteria.MaxLengthCriteria, stopping_criteria.EosTokenCriteria)
        if mode.value not in _MODES or any(type(one) not in PROCESSORS for one in processors):
            return None
        if any(type(one) not in kinds for one in criteria) or config.return_dict_in_generate:
            return None
        if not any(type(one) is kinds[0] for one in criteria):
            return None
        ends = [
            int(e) for one in criteria if type(one) is kinds[1] for e in one.eos_token_id.flatten().tolist()
        ]
        padding = config._pad_token_tensor
        if ends and padding is None:
            return None
        return Choice(tuple(processors), bool(config.do_sample), tuple(ends), int(padding) if ends else 0)

    def _loop(
        self, ids: torch.Tensor, mask: torch.Tensor | None, cache: Any, choice: Choice, steps: int
    ) -> torch.Tensor:
        """The tokens after the first one."""
        forward, (rows, length) = self.forward, ids.shape
        past = length - 1
        layers = forward.layers_of(cache, rows)
        step = self._step(rows, choice)
        state = step.state
        if steps > 0:
            seen = torch.ones_like(ids[:, :past], dtype=torch.bool) if mask is None else mask != 0
            state["ids"].copy_(ids[:, -1:])
            state["positions"].copy_(seen.sum(-1, keepdim=True))
            state["mask"].zero_()
            state["mask"][:, 0, 0, :past] = seen
            state["mask"][..., -1] = True
            state["place"].fill_(past)
            state["tokens"][:, :length] = ids
            state["tokens"][:, length:] = ids[:, -1:]  # a token that is in the sequence: processors ignore it
            state["unfinished"].copy_(~torch.isin(ids[:, -1], ids.new_tensor(choice.ends)))
            state["goes_on"].copy_(state["unfinished"].any())
            state["steps"].zero_()
            step.memory.copy_(stack_of(layers))
            with forward.answering():
                self._run(step, steps, bool(choice.ends))
        taken = int(state["steps"]) if steps > 0 and choice.ends else max(steps, 0)
        if taken:
            append_to(layers, step.memory[..., past : past + taken, :])
            forward.runs["token"] += taken
        return state["tokens"][:, : length + taken].clone() if taken else ids

    def _run(self, step: Step, steps: int, has_ends: bool) -> None:
        """Launch the steps until the host reads that all rows have ended, without waiting for each step."""
        if step.state["ids"].device.type == "cpu":
            for _ in range(steps):
                if has_ends and not bool(step.state["goes_on"]):
                    return
                step()
            return
        looks: deque[tuple[torch.cuda.Event, torch.Tensor]] = deque()
        for taken in range(steps):
            if has_ends and taken % _LOOK == 0:
                goes_on = torch.empty((), dtype=torch.bool, pin_memory=True)
                goes_on.copy_(step.state["goes_on"], non_blocking=True)
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record()
                looks.append((event, goes_on))
                if len(looks) > _AHEAD:
                    looks[0][0].synchronize()
            while looks and looks[0][0].query():  # type: ignore[no-untyped-call]
                if not bool(looks.popleft()[1]):
                    return
            step()

    def _step(self, rows: int, choice: Choice) -> Step:
        key = rows, choice.key
        with torch.inference_mode(False), torch.no_grad():  # later calls write to its tensors in any mode
            step = self._steps.pop(key, None) or Step(self.forward, rows, choice)
        self._steps[key] = step
        while len(self._steps) > _MOST_STEPS:
            self._steps.pop(next(iter(self._steps)))
        return step


def _stop_at(length: int) -> Any:
    """Criteria that stop at this length."""
    return stopping_criteria.StoppingCriteriaList([stopping_criteria.MaxLengthCriteria(length)])


def place(forward: GeneratingForward) -> None:
    """Put the compiled forward into its model and, if a step can choose tokens, a `generate`."""
    if can_loop(forward):
        forward.loop = LoopedGenerate(forward)
    forward.put()


def can_loop(forward: GeneratingForward) -> bool:
    """Whether steps can be taken: equal layers, a boolean mask, and programs, which a GPU has recorded."""
    anatomy = forward.anatomy
    plain = anatomy.source is None and anatomy.alike and not anatomy.slides and anatomy.positioned
    if not plain or anatomy.mask_dtype != torch.bool:
        return False
    programs = [each.token for each in forward.by_rows.values()]
    on_gpu = anatomy.device.type != "cpu"
    return all(
        isinstance(one, Compiled) and (isinstance(one.run, CudaGraphs) or not on_gpu) for one in programs
    )

"""One model and one cache of llama.cpp: rows in, logits out, cutting back. Nothing is printed.

Knows the C interface through the ctypes of llama-cpp-python, where a wrong argument ends the process: whoever
calls has checked them. Does not know feeds, nor which rows belong together.

N rows of a pass, V vocabulary.
"""

import ctypes
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from workers.checkpoints import ModelRefused

MAX_SEQUENCES = int(llama_cpp.llama_max_parallel_sequences())
ROWS_AT_ONCE = 512  # of a longer pass; what a row's work takes in memory is reserved for so many

_ERROR = 4  # of ggml_log_level
_FLOAT32, _FLOAT16, _BFLOAT16 = 0, 1, 30  # of ggml_type
_errors: deque[str] = deque(maxlen=4)  # what llama.cpp says of the last failures


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _keep_errors(level: int, text: bytes, _: object) -> None:
    if level == _ERROR:
        _errors.append(text.decode(errors="replace").strip())


llama_cpp.llama_log_set(_keep_errors, None)
llama_cpp.llama_backend_init()


class LlamaCppContext:
    """A loaded model with a cache of `length` positions for each of `num_sequences` sequences.

    Each sequence has its own part of the cache: in a common one every row is multiplied with every sequence's
    keys. llama.cpp's default, flash attention over float16, computes one row in another way than many, by
    which SmolLM2-135M's logits differ by 0.2. Without flash attention, over float32, they differ by the order
    of some sums. `in_order` the sums are the same for all: flash attention over float16 keys and bfloat16
    values, a combination for which there is one way only.
    """

    def __init__(
        self, file: Path, *, num_sequences: int, length: int, num_threads: int, in_order: bool
    ) -> None:
        """Load the file. Raises ModelRefused for one that llama.cpp does not take."""
        _errors.clear()
        parameters = llama_cpp.llama_model_default_params()
        parameters.n_gpu_layers = 0
        model = llama_cpp.llama_model_load_from_file(bytes(file), parameters)
        if not model:
            raise _refused(file, "does not load")
        self._model = model
        owned = [(llama_cpp.llama_model_free, model)]
        weakref.finalize(self, _free, owned)
        self._refuse_kinds(file)

        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = settings.n_batch = num_sequences * length
        settings.n_ubatch = min(num_sequences * length, ROWS_AT_ONCE)
        settings.n_seq_max = num_sequences
        settings.n_threads = settings.n_threads_batch = num_threads
        settings.type_k, settings.type_v = (_FLOAT16, _BFLOAT16) if in_order else (_FLOAT32, _FLOAT32)
        settings.flash_attn_type = (
            llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED if in_order else llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        settings.kv_unified = False
        settings.swa_full = True  # a window that is trimmed could not be cut back across its edge
        settings.offload_kqv = settings.op_offload = False
        context = llama_cpp.llama_init_from_model(model, settings)
        if not context:
            raise _refused(file, "gets no context")
        self._context = context
        owned.append((llama_cpp.llama_free, context))
        self._memory = llama_cpp.llama_get_memory(context)
        if not self._memory:
            raise _refused(file, "keeps no keys and values")
        self.vocab_size = int(llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model)))
        self.max_positions = int(llama_cpp.llama_model_n_ctx_train(model))
        self.window = int(llama_cpp.llama_model_n_swa(model))  # 0: none

    def _refuse_kinds(self, file: Path) -> None:
        kinds = {
            "is recurrent, with a state that cannot be cut back": llama_cpp.llama_model_is_recurrent,
            "has recurrent layers, whose state cannot be cut back": llama_cpp.llama_model_is_hybrid,
            "has an encoder; only a decoder alone continues its own text": llama_cpp.llama_model_has_encoder,
            "writes by diffusion, not from left to right": llama_cpp.llama_model_is_diffusion,
        }
        for fault, is_so in kinds.items():
            if is_so(self._model):
                raise ModelRefused(f"Model {str(file)!r} {fault}.")

    def decode(
        self, tokens: Sequence[int], positions: Sequence[int], sequences: Sequence[int], wanted: Sequence[int]
    ) -> NDArray[np.float32]:
        """Run a pass of N rows; the logits `[len(wanted), V]` of those wanted, which ascend.

        Each sequence's positions go on from what it holds. Sequences that follow each other by number, with
        as many rows each, share one reading of the weights. Raises RuntimeError when the pass fails.
        """
        num_rows = len(tokens)
        token, position, sequence = (np.array(values, np.int32) for values in (tokens, positions, sequences))
        one_each, is_wanted = np.ones(num_rows, np.int32), np.zeros(num_rows, np.int8)
        is_wanted[wanted] = 1
        lists = sequence.ctypes.data + sequence.itemsize * np.arange(num_rows, dtype=np.uintp)
        batch = llama_cpp.llama_batch(
            n_tokens=num_rows,
            token=_pointer(token, llama_cpp.llama_token),
            pos=_pointer(position, llama_cpp.llama_pos),
            n_seq_id=_pointer(one_each, ctypes.c_int32),
            seq_id=_pointer(lists, ctypes.POINTER(llama_cpp.llama_seq_id)),
            logits=_pointer(is_wanted, ctypes.c_int8),
        )
        _errors.clear()
        if status := llama_cpp.llama_decode(self._context, batch):
            raise RuntimeError(f"llama.cpp answers a pass of {num_rows} rows with {status}{_reason()}")
        if not wanted:
            return np.empty((0, self.vocab_size), np.float32)
        logits = llama_cpp.llama_get_logits(self._context)
        if not logits:
            raise RuntimeError("llama.cpp computes no logits for this model")
        # Copied: the next pass writes to the same place.
        return np.ctypeslib.as_array(logits, (len(wanted), self.vocab_size)).copy()

    def cut(self, sequence: int, length: int) -> bool:
        """Forget all but the first `length` positions of a sequence; whether that is possible."""
        return bool(llama_cpp.llama_memory_seq_rm(self._memory, sequence, length, -1))

    def copy(self, source: int, sequence: int) -> None:
        """Let an empty sequence hold all that another one does: those with caches of their own share no part.

        The next pass copies, and takes longer by that.
        """
        llama_cpp.llama_memory_seq_cp(self._memory, source, sequence, -1, -1)

    def length(self, sequence: int) -> int:
        """How many positions a sequence holds."""
        return int(llama_cpp.llama_memory_seq_pos_max(self._memory, sequence)) + 1


def _free(owned: list[tuple[Callable[[object], None], object]]) -> None:
    """The context before its model."""
    while owned:
        release, pointer = owned.pop()
        release(pointer)


def _pointer(values: NDArray[np.generic], kind: type) -> object:
    return values.ctypes.data_as(ctypes.POINTER(kind))


def _refused(file: Path, what: str) -> ModelRefused:
    return ModelRefused(f"Model {str(file)!r} {what} in llama.cpp{_reason()}.")


def _reason() -> str:
    """Its last words, as the end of a sentence."""
    return f" ({'; '.join(_errors)})" if _errors else ""

"""Several engines one after the other in one process, with and without the capture.

Run by engine_runs.py as ``python vllm_session.py MODEL DIR``, since a process with vLLM takes long
to start. Writes ``DIR/<run>.json`` with what the driver received.
"""

import gc
import json
import os
import random
import sys
from pathlib import Path

os.environ |= {
    "HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_USE_V2_MODEL_RUNNER": "0",
}  # fmt: skip

from vllm import LLM, SamplingParams

from rlk_adapters import vllm_recorder, vllm_tap

NUM_PROMPTS = 10
MIXES = (
    {"temperature": 1.0, "logprobs": 0},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.7, "top_p": 0.9, "logprobs": 0},
    {"temperature": 1.3, "top_k": 50, "min_p": 0.01, "logprobs": 0},
    {"temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 0.5, "logprobs": 0},
    {"temperature": 1.0, "logit_bias": {100: 5.0, 200: 3.0}, "logprobs": 0},
    {"temperature": 1.0},
)
counts = {"resumed": 0, "discarded": 0}


def count_preemption_and_chunks() -> None:
    begin, keep = vllm_tap.VllmTap._begin, vllm_recorder.RequestTable.keep

    def counting_begin(self, scheduler_output):
        counts["resumed"] += len(scheduler_output.scheduled_cached_reqs.resumed_req_ids)
        begin(self, scheduler_output)

    def counting_keep(self, record, sample):
        counts["discarded"] += int(sample.discarded.sum())
        return keep(self, record, sample)

    vllm_tap.VllmTap._begin, vllm_recorder.RequestTable.keep = counting_begin, counting_keep


def start(model: str) -> LLM:
    """An engine that preempts, and cuts prompts into chunks."""
    return LLM(
        model=model, skip_tokenizer_init=True, dtype="float32", enforce_eager=True, seed=0,
        max_model_len=96, max_num_seqs=8, max_num_batched_tokens=16, block_size=32,
        num_gpu_blocks_override=5, kv_cache_memory_bytes=32 << 20, disable_log_stats=True,
    )  # fmt: skip


def generate(model: str) -> list[dict]:
    """What the driver receives."""
    llm = start(model)
    rng = random.Random(0)
    prompts = [
        {"prompt_token_ids": [rng.randrange(150000) for _ in range(rng.randint(1, 45))]}
        for _ in range(NUM_PROMPTS)
    ]
    params = [
        SamplingParams(max_tokens=12, detokenize=False, **MIXES[i % len(MIXES)])
        for i in range(NUM_PROMPTS)
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    received = [
        {
            "label": output.request_id,
            "prompt_token_ids": output.prompt_token_ids,
            "token_ids": list(completion.token_ids),
            "logprobs": completion.logprobs
            and [
                entry[i].logprob
                for i, entry in zip(completion.token_ids, completion.logprobs, strict=True)
            ],
        }
        for output in outputs
        for completion in output.outputs
    ]
    if "RLK_CAPTURE_DIR" in os.environ:
        (received[0]["status"],) = llm.collective_rpc("rlk_close")
        late = llm.generate(prompts[:1], params[:1], use_tqdm=False)
        received[0]["sampled_late"] = len(late[0].outputs[0].token_ids)
    llm.llm_engine.engine_core.shutdown()
    return received


def begin(name: str, capture: Path | None = None) -> None:
    print(f"== {name}", file=sys.stderr, flush=True)
    os.environ.pop("RLK_CAPTURE_DIR", None)
    if capture is not None:
        os.environ["RLK_CAPTURE_DIR"] = str(capture)
    # vLLM collects garbage eight times an engine, over all that is imported
    gc.freeze()


def shut_down(name: str, *, amid: bool) -> None:
    """End an engine as a server does: nobody calls ``rlk_close``."""
    begin(name, OUT / name)
    llm = start(MODEL)
    prompt = {"prompt_token_ids": [1, 2, 3]}
    llm.llm_engine.add_request("a", prompt, SamplingParams(max_tokens=4, detokenize=False))
    core = llm.llm_engine.engine_core.engine_core
    llm.llm_engine.step()
    # a server goes on stepping until the workers know of all that has finished
    while not amid and core.scheduler.has_requests():
        core.step_fn()
    llm.llm_engine.engine_core.shutdown()


def run(name: str, capture: Path | None = None) -> None:
    begin(name, capture)
    (OUT / f"{name}.json").write_text(json.dumps(generate(MODEL)))


def break_the_tap(after: int) -> None:
    """Have the hook itself fail, on the engine's thread, when called once more than ``after``."""
    take, calls = vllm_tap.VllmTap._take_shard, iter(range(after))

    def failing(self, full, lm_head):
        if next(calls, None) is None:
            raise RuntimeError("the tap broke")
        take(self, full, lm_head)

    vllm_tap.VllmTap._take_shard = failing


if __name__ == "__main__":
    MODEL, OUT = sys.argv[1], Path(sys.argv[2])
    count_preemption_and_chunks()
    run("captured", OUT / "captured")
    (OUT / "counts.json").write_text(json.dumps(counts))
    run("not-captured")
    shut_down("shut-down-amid", amid=True)
    shut_down("shut-down-idle", amid=False)
    (OUT / "a-file").touch()
    run("no-directory", OUT / "a-file" / "capture")
    break_the_tap(after=5)
    run("tap-broke", OUT / "tap-broke")

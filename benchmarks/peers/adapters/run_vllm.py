"""vLLM for CPUs: whole prompts, prefix caching on, one token an answer, chosen among the answers' ids."""

from __future__ import annotations

import os
from typing import Any

from serving import Request, run_by_steps, serve

BATCHED_TOKENS = 4096
"""Tokens of a pass at most."""
SEQUENCES = 256
"""Prompts of a pass at most."""
CONTEXT = 8192


class VLLM:
    """The offline engine, in this very process: nothing waits for another."""

    def boot(self, message: dict[str, Any]) -> dict[str, Any]:
        """Loads and compiles the model and answers one prompt."""
        cores = sorted(os.sched_getaffinity(0))[: message["threads"]]
        os.environ |= {
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": str(message["kv_gib"]),
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
        }
        import vllm

        options: dict[str, Any] = {
            "enable_prefix_caching": True,
            "max_num_batched_tokens": BATCHED_TOKENS,
            "max_num_seqs": SEQUENCES,
            "max_model_len": CONTEXT,
            "dtype": message["dtype"],
        }
        if "QUAIL_PEERS_VLLM_BLOCK" in os.environ:
            options["block_size"] = int(os.environ["QUAIL_PEERS_VLLM_BLOCK"])
        self.engine = vllm.LLM(
            message["folder"], skip_tokenizer_init=True, seed=0, disable_log_stats=True, **options
        )
        self.answer([Request(0, 0, message["prompt"])], [message["answers"]])
        told = {"kv_gib": message["kv_gib"], "preloaded": os.environ.get("LD_PRELOAD", "")}
        return {"engine": f"vLLM {vllm.__version__}", "settings": options | told}

    def forget(self) -> None:
        """Empties the prefix cache."""
        if not self.engine.reset_prefix_cache():
            raise RuntimeError("the prefix cache was not emptied")

    def run(self, message: dict[str, Any]) -> dict[str, Any]:
        """Answers a workload."""
        return run_by_steps(message, self.answer)

    def answer(self, requests: list[Request], readout: list[list[int]]) -> tuple[list[int], int]:
        """The index of the best answer of each prompt, and the tokens that were in no cache."""
        from vllm import SamplingParams

        answer_of = {token: index for index, ids in enumerate(readout) for token in ids}
        sampling = SamplingParams(
            temperature=0.0, max_tokens=1, allowed_token_ids=sorted(answer_of), detokenize=False
        )
        prompts = [{"prompt_token_ids": request.ids} for request in requests]
        outputs = self.engine.generate(prompts, sampling, use_tqdm=False)
        found = [answer_of[output.outputs[0].token_ids[0]] for output in outputs]
        cached = sum(output.num_cached_tokens or 0 for output in outputs)
        return found, sum(len(request.ids) for request in requests) - cached


if __name__ == "__main__":
    serve(VLLM())

"""A client of one's own: a pool of servers that generates, and takes weights.

    python rollout_pool.py --model DIR --server http://127.0.0.1:8000 --server http://127.0.0.1:8001 --out TRAINED

Any object with the four calls is a client. It must reach every replica, at the same time, return when all are done, and raise if
one fails. This one also stops handing out work while weights change, so that the library has nothing to pause.
"""

import argparse
import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import requests
import torch
from transformers import AutoModelForCausalLM

from wt_trainer import GlooTrainerInitInfo, ModuleSource, WeightTransferTrainerFactory

TIMEOUT_S = 60


class RolloutPool:
    """Hands prompts to the servers in turn; within `held()` it hands out none, and none is in hand."""

    def __init__(self, urls: list[str]) -> None:
        self.urls = urls
        self._next = itertools.cycle(urls)
        self._threads = ThreadPoolExecutor(max_workers=4 * len(urls))
        self._changed = threading.Condition()
        self._is_held = False
        self._in_hand = 0

    # --- generating ----------------------------------------------------------------------------------------

    def rollout(self, prompt: list[int], num_tokens: int) -> list[int]:
        """The most likely tokens after `prompt`, from whichever server's turn it is."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_held)
            self._in_hand += 1
            url = next(self._next)
        try:
            body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "return_token_ids": True}
            return self._post(url, "/v1/completions", body)["choices"][0]["token_ids"]
        finally:
            with self._changed:
                self._in_hand -= 1
                self._changed.notify_all()

    @contextmanager
    def held(self) -> Iterator[None]:
        with self._changed:
            self._is_held = True
            self._changed.wait_for(lambda: self._in_hand == 0)
        try:
            yield
        finally:
            with self._changed:
                self._is_held = False
                self._changed.notify_all()

    # --- the four calls ------------------------------------------------------------------------------------

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._post_all("/init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self._post_all("/start_weight_update", {})

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._post_all("/update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._post_all("/finish_weight_update", {"weight_version": weight_version})

    def _post_all(self, path: str, body: dict[str, Any]) -> None:
        calls = [self._threads.submit(self._post, url, path, body) for url in self.urls]
        errors = [error for call in calls if (error := call.exception()) is not None]  # waits for all
        if errors:
            raise errors[0]

    def _post(self, url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        reply = requests.post(url + path, json=body, timeout=TIMEOUT_S)
        if not reply.ok:
            raise RuntimeError(f"{reply.status_code} on {url}{path}: {reply.text}")
        return reply.json()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="the checkpoint that the servers have started with")
    parser.add_argument("--server", required=True, action="append", help="URL of one server; give one or several")
    parser.add_argument("--out", required=True, help="where the trained model is saved")
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    pool = RolloutPool(args.server)
    trainer = WeightTransferTrainerFactory.trainer_init(
        GlooTrainerInitInfo(rank=0, timeout_s=TIMEOUT_S), client=pool, source=ModuleSource(model)
    )
    with ThreadPoolExecutor(max_workers=8) as actors:
        for step in range(2):
            prompts = [[1 + step, 2, 3 + index] for index in range(8)]
            rollouts = list(actors.map(lambda prompt: prompt + pool.rollout(prompt, 8), prompts))
            batch = torch.tensor(rollouts)
            model(input_ids=batch, labels=batch).loss.backward()  # in place of a policy's loss
            optimizer.step()
            optimizer.zero_grad()
            with pool.held():
                print(trainer.send_weights(weight_version=f"step-{step}"))
    trainer.shutdown()
    model.save_pretrained(args.out)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Losses, weights and optimizer state are those of the user's own loop on the unmodified model, bit for bit."""
import itertools
import unittest

from drawn import drawn
from torch_cases import FAMILIES
from torch_support import ALL, RankCase

OPTIMIZERS = ("fused", "foreach", "sgd", "loop")
SIX = {"num_hidden_layers": 6}  # blocks: two stages for each of 4 ranks, also in the controller's plans


class Bits(RankCase):
    def test_every_family_with_layers_that_move(self):
        cases = [
            {"family": family, "steps": 30 if ALL else 18, "micro_batches": 4, "seed": index, "optimizer": OPTIMIZERS[index % 4], "clip": 1.0, "freeze": True}
            for index, family in drawn(enumerate(FAMILIES), 2, "the families that move")
        ]
        self.compare(cases, 4)

    def test_balancing_on_changes_no_bit(self):
        common = {"steps": 30 if ALL else 18, "micro_batches": 4, "clip": 1.0, "freeze": True, "balance": True}
        cases = [
            {**common, "family": family, "config": SIX, "seed": 30 + index, "optimizer": OPTIMIZERS[index % 4]}
            for index, family in drawn(enumerate(FAMILIES if ALL else ("llama", "qwen2", "mixtral")), 1, "the families that are balanced")
        ]
        self.compare(cases, 4)

    def test_other_numbers_of_ranks_and_ways_to_train(self):
        llama = {"family": "llama", "steps": 12, "micro_batches": 4, "clip": 0.5, "freeze": True}
        cases = [
            {**llama, "items": True, "seed": 20},
            {**llama, "accumulation": 2, "seed": 21},
            {**llama, "autocast": True, "seed": 22},
            {**llama, "checkpointing": True, "samples": 2, "seed": 23},
            {**llama, "micro_batches": 3, "optimizer": "sgd", "seed": 24},
            {**llama, "family": "qwen3", "config": {"tie_word_embeddings": True}, "canonical": True, "freeze": False, "seed": 25},
            {**llama, "family": "gpt2", "config": {"tie_word_embeddings": True}, "canonical": True, "seed": 26},
        ]
        cases = drawn(cases, 2, "the ways to train")
        for ranks in (3, 2):
            with self.subTest(ranks=ranks):
                self.compare(cases, ranks)

    def test_adapters_on_a_frozen_base(self):
        common = {"steps": 8, "micro_batches": 4, "clip": 1.0, "adapters": True}
        kinds = itertools.product(("llama", "qwen3"), (False, "plain", "reentrant"))
        cases = [{**common, "family": family, "checkpointing": kind, "seed": 40 + index} for index, (family, kind) in enumerate(kinds)]
        self.compare(drawn(cases, 2, "the adapters"), 3)

    def test_gradients_of_weights_apart(self):
        """Under zb-h1, zb-v and adaptive orders, which moves exchange."""
        common = {"steps": 12, "micro_batches": 4, "clip": 1.0, "freeze": True, "apart": True}
        cases = [
            *({**common, "family": family, "seed": 50 + index, "optimizer": OPTIMIZERS[index % 4]} for index, family in enumerate(FAMILIES)),
            {**common, "family": "llama", "autocast": True, "seed": 60},
            {**common, "family": "qwen3", "checkpointing": "plain", "seed": 61},
            {**common, "family": "llama", "adapters": True, "freeze": False, "checkpointing": "reentrant", "seed": 62},
        ]
        self.compare(drawn(cases, 3, "the families with I and W apart"), 3)

    def test_a_loss_of_the_routers_of_all_blocks(self):
        common = {"family": "mixtral", "config": {"output_router_logits": True}, "steps": 12, "micro_batches": 4, "clip": 1.0, "freeze": True}
        cases = [
            {**common, "seed": 70},
            {**common, "apart": True, "seed": 71},
            {**common, "autocast": True, "items": True, "seed": 72},
            {**common, "checkpointing": "plain", "seed": 73},
            {**common, "checkpointing": "reentrant", "freeze": False, "seed": 74},
        ]
        self.compare(drawn(cases, 2, "the losses of routers"), 3)

    def test_one_rank_is_the_plain_loop(self):
        self.compare([{"family": "gemma3_text", "steps": 12, "micro_batches": 2, "clip": 1.0, "freeze": True}], 1)


if __name__ == "__main__":
    unittest.main()

"""A bigram model's perplexity on wikitext2: what a language model reaches that sees one token back.

Interpolated Kneser-Ney (Chen and Goodman 1999, section 2.7) with one discount, D = n1 / (n1 + 2 n2), counted on the
training tokens and judged on exactly the targets that an evaluation at the same global batch has.

    python benchmarks/baselines/bigram.py [--global-batch 20] [--seq-len 35]
"""

import argparse
import math

import numpy as np

from shardlab.config.schema import TextConfig, Tokens
from shardlab.data.dataset import Dataset, open_dataset
from shardlab.data.prepare import prepare


def pairs(dataset: Dataset, split: str, global_batch: int) -> tuple[np.ndarray, np.ndarray]:
    """Every (input token, target token) of a pass."""
    batches = [
        dataset.batch(split, step, global_batch=global_batch, seed=0, epoch=0)
        for step in range(dataset.steps(split, global_batch))
    ]
    inputs = np.concatenate([batch.inputs.flatten().numpy() for batch in batches])
    return inputs, np.concatenate([batch.targets.flatten().numpy() for batch in batches])


def main() -> None:
    """Count, judge, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--global-batch", type=int, default=20)
    parser.add_argument("--seq-len", type=int, default=35)
    options = parser.parse_args()
    config = TextConfig("wikitext2", None, Tokens.basic_english, options.seq_len)
    dataset = open_dataset(prepare(config), config)
    size = dataset.vocab_size

    first, second = pairs(dataset, "train", 1)
    kinds, counts = np.unique(first * size + second, return_counts=True)
    n1, n2 = (counts == 1).sum(), (counts == 2).sum()
    discount = n1 / (n1 + 2 * n2)
    context = np.bincount(first, minlength=size)
    followers = np.bincount(kinds // size, minlength=size)  # different words after v
    leaders = np.bincount(kinds % size, minlength=size)  # different words before w
    # The continuation law, itself mixed with a uniform one, so that no word is impossible.
    continuation = np.maximum(leaders - discount, 0) / len(kinds) + discount * (leaders > 0).sum() / len(kinds) / size

    for split in ("val", "test"):
        v, w = pairs(dataset, split, options.global_batch)
        at = np.minimum(np.searchsorted(kinds, v * size + w), len(kinds) - 1)
        seen = np.where(kinds[at] == v * size + w, counts[at], 0)
        total = np.maximum(context[v], 1)
        backed_off = np.where(context[v] > 0, discount * followers[v] / total, 1.0)
        probability = np.maximum(seen - discount, 0) / total + backed_off * continuation[w]
        loss = -np.log(probability).mean()
        print(f"bigram, {split}: {len(w)} targets, loss {loss:.4f}, perplexity {math.exp(loss):.1f}")


if __name__ == "__main__":
    main()

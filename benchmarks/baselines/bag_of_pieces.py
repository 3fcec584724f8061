"""A linear model on NSMC: logistic regression over which word pieces a review has, order forgotten.

The same pieces, the same cut at max_length and the same split as a run of ours. The strength of the regularisation
is chosen on the validation rows; test is looked at once, with the chosen one.

    python benchmarks/baselines/bag_of_pieces.py [--max-length 64]
"""

import argparse

import numpy as np
from scipy.sparse import csr_matrix
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, f1_score, precision_score, recall_score

from shardlab.config.schema import NsmcConfig, Tokenizer
from shardlab.data.dataset import Dataset, open_dataset
from shardlab.data.prepare import prepare

STRENGTHS = (0.03, 0.1, 0.3, 1.0)


def bags(dataset: Dataset, split: str) -> tuple[csr_matrix, np.ndarray]:
    """Presence of each piece in each row: [rows, vocabulary], and the labels."""
    columns, ends, labels = [], [0], []
    for step in range(dataset.steps(split, 1000)):
        batch = dataset.batch(split, step, global_batch=1000, seed=0, epoch=0)
        for pieces, length in zip(batch.inputs.numpy(), batch.lengths.tolist(), strict=True):
            columns.append(np.unique(pieces[:length]))
            ends.append(ends[-1] + len(columns[-1]))
        labels.append(batch.targets.numpy())
    flat = np.concatenate(columns)
    matrix = csr_matrix((np.ones(len(flat), np.float32), flat, ends), shape=(len(columns), dataset.vocab_size))
    return matrix, np.concatenate(labels)


def main() -> None:
    """Fit, choose, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max-length", type=int, default=64)
    options = parser.parse_args()
    config = NsmcConfig("nsmc", None, Tokenizer.multilingual_bert, options.max_length, 10000)
    dataset = open_dataset(prepare(config), config)
    train, val = bags(dataset, "train"), bags(dataset, "val")
    best, best_accuracy = None, 0.0
    for strength in STRENGTHS:
        model = LogisticRegression(C=strength, max_iter=500).fit(*train)
        accuracy = model.score(*val)
        print(f"C={strength}: validation accuracy {accuracy:.4f}")
        if accuracy > best_accuracy:
            best, best_accuracy = model, accuracy
    assert best is not None
    rows, labels = bags(dataset, "test")
    guess = best.predict(rows)
    scores = {
        score.__name__.removesuffix("_score"): score(labels, guess)
        for score in (accuracy_score, f1_score, precision_score, recall_score)
    }
    print(f"bag of pieces, C={best.C}, test: " + ", ".join(f"{name} {value:.4f}" for name, value in scores.items()))


if __name__ == "__main__":
    main()

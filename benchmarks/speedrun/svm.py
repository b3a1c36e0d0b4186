"""RBF SVM of scikit-learn, on pixels or on HOG features of scikit-image

run.py svm.py --seeds 1 -- pixels 10        # both have no random numbers
run.py svm.py --seeds 1 -- hog 10 0.08      # needs scikit-image and lazy_loader on PYTHONPATH
"""

import pickle
import sys
from pathlib import Path

import numpy as np
from sklearn.svm import SVC

CELLS = {"orientations": 9, "pixels_per_cell": (4, 4), "cells_per_block": (2, 2)}


def train(data: str, seed: str, model: str, of: str = "pixels", c: str = "10", gamma: str = "scale") -> None:
    """Fit the SVM. It has no random numbers, so all seeds are equal."""
    images, labels = (np.load(Path(data) / f"{name}.npy") for name in ("images", "labels"))
    machine = SVC(C=float(c), gamma=gamma if gamma == "scale" else float(gamma), cache_size=4000)
    Path(model).write_bytes(pickle.dumps((of, machine.fit(features(images, of), labels))))


def predict(model: str, images: str, predictions: str) -> None:
    """Predict the classes."""
    of, machine = pickle.loads(Path(model).read_bytes())
    np.save(predictions, machine.predict(features(np.load(images), of)))


def features(images: np.ndarray, of: str) -> np.ndarray:
    """Pixels, or histograms of gradients in cells of 4 x 4 pixels, normalised in blocks of 2 x 2 cells: [n, 1296]."""
    if of == "pixels":
        return images.reshape(len(images), -1).astype(np.float32) / 255
    from skimage.feature import hog

    return np.stack([hog(image, **CELLS) for image in images]).astype(np.float32)


if __name__ == "__main__":
    {"train": train, "predict": predict}[sys.argv[1]](*sys.argv[2:])

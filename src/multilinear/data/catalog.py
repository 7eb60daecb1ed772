"""The image sets known by name, and what their labels mean."""

_DIGITS = [str(digit) for digit in range(10)]
_ORGANS = [
    *("bladder", "femur-left", "femur-right", "heart", "kidney-left", "kidney-right"),
    *("liver", "lung-left", "lung-right", "pancreas", "spleen"),
]

# as their authors publish them, in label order
MEDMNIST_CLASSES: dict[str, list[str]] = {
    "pathmnist": [
        "adipose",
        "background",
        "debris",
        "lymphocytes",
        "mucus",
        "smooth muscle",
        "normal colon mucosa",
        "cancer-associated stroma",
        "colorectal adenocarcinoma epithelium",
    ],
    "dermamnist": [
        "actinic keratoses and intraepithelial carcinoma",
        "basal cell carcinoma",
        "benign keratosis-like lesions",
        "dermatofibroma",
        "melanoma",
        "melanocytic nevi",
        "vascular lesions",
    ],
    "octmnist": ["choroidal neovascularization", "diabetic macular edema", "drusen", "normal"],
    "pneumoniamnist": ["normal", "pneumonia"],
    "retinamnist": ["grade 0", "grade 1", "grade 2", "grade 3", "grade 4"],
    "breastmnist": ["malignant", "normal, benign"],
    "bloodmnist": [
        "basophil",
        "eosinophil",
        "erythroblast",
        "immature granulocytes (myelocytes, metamyelocytes and promyelocytes)",
        "lymphocyte",
        "monocyte",
        "neutrophil",
        "platelet",
    ],
    "tissuemnist": [
        "Collecting Duct, Connecting Tubule",
        "Distal Convoluted Tubule",
        "Glomerular endothelial cells",
        "Interstitial endothelial cells",
        "Leukocytes",
        "Podocytes",
        "Proximal Tubule Segments",
        "Thick Ascending Limb",
    ],
    "organamnist": _ORGANS,
    "organcmnist": _ORGANS,
    "organsmnist": _ORGANS,
}

# every image of these carries several labels at once
MULTI_LABEL = ("chestmnist",)

_CLASSES: dict[str, list[str]] = {
    "digits": _DIGITS,
    "mnist": _DIGITS,
    "svhn": _DIGITS,
    "cifar10": ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"],
    "fashion-mnist": [
        *("T-shirt/top", "trouser", "pullover", "dress", "coat"),
        *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
    ],
    **MEDMNIST_CLASSES,
}

DATASET_NAMES: tuple[str, ...] = tuple(sorted([*_CLASSES, "flowers102", "tiny-imagenet"]))


def class_names(name: str) -> list[str] | None:
    """The classes of a known set in label order; None where only the data itself can tell.

    >>> class_names("pneumoniamnist")
    ['normal', 'pneumonia']
    """
    if name == "flowers102":
        from torchvision.datasets import Flowers102

        return list(Flowers102.classes)
    return list(_CLASSES[name]) if name in _CLASSES else None

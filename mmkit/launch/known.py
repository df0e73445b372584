"""What is known of what the published presets name: weights on the hub, data files, folders of pictures.

Sizes, licences and gates with where they were read; what is not known is not here, and is asked of the hub
by `requirements`.
"""

from __future__ import annotations

import dataclasses

ARCHIVES = ("*.tar*", "*.tgz", "*.zip")


@dataclasses.dataclass(frozen=True)
class Published:
    """What is known of something published: bytes (None: unknown), licence, and for data where it is."""

    size: int | None
    licence: str
    gated: bool = False
    repository: str = ""  # of data: a data set repository of the hub, and the file in it
    file: str = ""
    archives: tuple[str, ...] = ()  # patterns of that repository's picture archives
    how: str = ""  # one sentence: where to get it where nothing can be fetched, or what is left to do after
    archives_size: int | None = None  # bytes of the archives


LLAMA_2 = "Llama 2 Community License"
LLAMA_1 = "LLaMA licence: non-commercial"
# Language models: parameters of the published architecture times 2 bytes, which is to the byte the total_size
# that Llama 3's own index states. Encoders: both towers of the published model in fp32, of which the image
# tower is read (openai's: the size of its file). tests/launch count all of them again. Licences: the
# repositories' cards (Vicuna v1.3's: "non-commercial", on LLaMA 1); OpenAI's states none, its code is MIT.
WEIGHTS: dict[str, Published] = {
    "meta-llama/Meta-Llama-3-8B-Instruct": Published(16_060_522_496, "Llama 3 Community License", gated=True),
    "lmsys/vicuna-7b-v1.3": Published(13_476_831_232, LLAMA_1),
    "lmsys/vicuna-13b-v1.3": Published(26_031_728_640, LLAMA_1),
    "lmsys/vicuna-7b-v1.5": Published(13_476_831_232, LLAMA_2),
    "lmsys/vicuna-13b-v1.5": Published(26_031_728_640, LLAMA_2),
    "NousResearch/Nous-Hermes-2-Yi-34B": Published(68_777_834_496, "Apache-2.0"),
    "microsoft/Phi-3-mini-4k-instruct": Published(7_642_159_104, "MIT"),
    "timm/ViT-SO400M-14-SigLIP-384": Published(3_511_841_992, "Apache-2.0"),
    "openai/clip-vit-large-patch14-336": Published(1_711_974_081, "none stated (OpenAI's code: MIT)"),
    "facebook/dinov2-giant": Published(4_545_923_072, "Apache-2.0"),
    "laion/CLIP-convnext_xxlarge-laion2B-s34B-b82K-augreg-soup": Published(4_802_305_540, "MIT"),
}
# Sizes and licences of data: the files and the card of each repository on the hub, Cambrian's with the notice of
# github.com/cambrian-mllm/cambrian, that sources keep their own.
CAMBRIAN = "Apache-2.0, and that of each source; OpenAI terms of use"
LLAVA = "CC BY 4.0, and that of each source; OpenAI terms of use"
UNPACK = (
    "the archives come as they are: join those in parts and unpack all of them in the folder of pictures, as "
    "the repository's page says"
)
GRIT = Published(
    None, "CC BY-NC 4.0, as apple/ml-ferret states",
    how="Apple describes GRIT (arXiv 2310.07704) and has no training file in apple/ml-ferret: it is to be "
    "built from Visual Genome, COCO, RefCOCO, Flickr30k Entities and Objects365",
)  # fmt: skip
DATA: dict[str, Published] = {  # by the last part of a source's path
    "alignment_2.5m.jsonl": Published(
        2_250_000_000, CAMBRIAN, False, "nyu-visionx/Cambrian-Alignment", "jsons/alignment_2.5m.jsonl",
        ARCHIVES, how=UNPACK,
    ),
    "Cambrian7M_withsystemprompt.jsonl": Published(
        7_320_000_000, CAMBRIAN, False, "nyu-visionx/Cambrian-10M", "jsons/Cambrian7M_withsystemprompt.jsonl",
        ARCHIVES, how=UNPACK,
    ),
    "blip_laion_cc_sbu_558k.json": Published(
        181_000_000, "its card's: those of CC-3M and of BLIP's captions", False, "liuhaotian/LLaVA-Pretrain",
        "blip_laion_cc_sbu_558k.json", ("images.zip",), "unpack images.zip in the folder of pictures",
        archives_size=27_400_000_000,
    ),
    "llava_v1_5_mix665k.json": Published(
        1_030_000_000, LLAVA, False, "liuhaotian/LLaVA-Instruct-150K", "llava_v1_5_mix665k.json",
        how="the pictures are those of COCO train2017, GQA, OCR-VQA, TextVQA and Visual Genome, from their own "
        "sites: addresses and folders are in https://github.com/haotian-liu/LLaVA#visual-instruction-tuning",
    ),
    **dict.fromkeys(
        [
            f"{name}.json" for name in (
                "git_instruction", "vg_objects", "vg_relations", "vg_regions", "grounded_llava_boxes_detail",
                "grounded_llava_boxes_complex_reasoning", "grounded_llava_boxes_conversation", "refexp_all",
                "flickr", "objects365",
            )
        ],
        GRIT,
    ),
    "laion2B-en": Published(  # the size at 384 pixels: dataset_examples/laion5B.md of rom1504/img2dataset
        int(84.8 * 2**40), "CC BY 4.0 for the list; each picture its own",
        how="LAION publishes addresses and captions, not pictures, and has replaced LAION-5B by Re-LAION-5B "
        "(https://laion.ai/blog/relaion-5b): get its parquet files, then run img2dataset --url_list "
        "PARQUET_FOLDER --input_format parquet --url_col URL --caption_col TEXT --output_format webdataset "
        "--image_size 384 --resize_mode keep_ratio --resize_only_if_bigger True --output_folder laion2B-en",
    ),
}  # fmt: skip
PICTURES: dict[str, Published] = {  # by a part of the path of a folder of pictures, the last that is known
    "train2017": Published(
        18 * 10**9,
        "Flickr terms of use",
        how="http://images.cocodataset.org/zips/train2017.zip (cocodataset.org)",
    ),
    "train2014": Published(
        13 * 10**9,
        "Flickr terms of use",
        how="http://images.cocodataset.org/zips/train2014.zip (cocodataset.org)",
    ),
    "vg": Published(
        None,
        "CC BY 4.0",
        how="https://cs.stanford.edu/people/rak248/VG_100K_2/images.zip and images2.zip (Visual Genome)",
    ),
    "flickr30k": Published(
        None,
        "research and education only",
        how="ask for it at https://shannon.cs.illinois.edu/DenotationGraph",
    ),
    **dict.fromkeys(
        ["objects365", "objects365_v1"], Published(None, "its own terms", how="https://www.objects365.org")
    ),
}

"""Both readings of image-text retrieval against hand-made and full matrices."""

import pytest
import torch
import torch.nn.functional as F

from mmkit.evaluation.retrieval import benchmark_recall, paired_recall


def pairs(n, d=16, noise=1.0):
    g = torch.Generator().manual_seed(0)
    image = F.normalize(torch.randn(n, d, generator=g), dim=-1)
    return image, F.normalize(image + noise * torch.randn(n, d, generator=g), dim=-1)


def open_clips_metrics(image, text):
    """open_clip's in-training numbers, on one full matrix."""
    metrics = {}
    for name, scores in (("image_to_text", image @ text.T), ("text_to_image", text @ image.T)):
        ranking = scores.argsort(descending=True)
        ranks = torch.where(ranking == torch.arange(len(scores))[:, None])[1].float()
        metrics |= {f"{name}_mean_rank": ranks.mean().item() + 1, f"{name}_median_rank": ranks.quantile(0.5).floor().item() + 1}
        metrics |= {f"{name}_R@{k}": (ranks < k).float().mean().item() for k in (1, 5, 10)}
    return metrics


@pytest.mark.parametrize("chunk", [1, 7, 128, 1000])
def test_chunked_ranks_equal_the_full_matrix(chunk):
    image, text = pairs(300)
    assert paired_recall(image, text, chunk=chunk) == pytest.approx(open_clips_metrics(image, text))


def test_two_thousand_pairs_never_make_a_full_matrix():
    n, chunk, sizes = 2000, 128, []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            sizes.extend(x.numel() for x in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(x, torch.Tensor))
            return out

    image, text = pairs(n)
    whole = paired_recall(image, text, chunk=n)
    with Sizes():
        assert paired_recall(image, text, chunk=chunk) == pytest.approx(whole)
    assert max(sizes) <= n * chunk


def test_a_hand_made_matrix_with_five_captions():
    """Image 0 has captions 0-2, image 1 captions 3-4; scores are chosen so that both directions differ."""
    image = torch.eye(2)
    text = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.6, 0.5], [0.3, 0.7], [0.8, 0.4]])
    owner = torch.tensor([0, 0, 0, 1, 1])
    found = benchmark_recall(image, text, owner, ks=(1, 2))
    assert found["image_retrieval_recall@1"] == pytest.approx(3 / 5)  # captions 0, 2, 3 find their image first
    assert found["image_retrieval_recall@2"] == 1
    assert found["text_retrieval_recall@1"] == pytest.approx(1 / 2)  # image 1's nearest caption is 1, of image 0
    assert found["text_retrieval_recall@2"] == 1  # caption 3 is second for image 1


def full_benchmark(image, text, owner, k):
    """clip-benchmark's reading on a full matrix with one-hot positives."""
    positive = owner[:, None] == torch.arange(len(image))
    scores = text @ image.T
    both = ((scores, positive), (scores.T, positive.T))
    hits = [(torch.zeros_like(s).scatter_(1, s.topk(k, dim=1).indices, 1.0).bool() & p).any(1) for s, p in both]
    return {f"image_retrieval_recall@{k}": hits[0].float().mean().item(), f"text_retrieval_recall@{k}": hits[1].float().mean().item()}


@pytest.mark.parametrize("chunk", [3, 64])
def test_several_captions_an_image_equal_the_full_matrix(chunk):
    g = torch.Generator().manual_seed(0)
    image = F.normalize(torch.randn(40, 8, generator=g), dim=-1)
    owner = torch.arange(200) // 5
    text = F.normalize(image[owner] + torch.randn(200, 8, generator=g), dim=-1)
    for k in (1, 5, 10):
        assert benchmark_recall(image, text, owner, ks=(k,), chunk=chunk) == pytest.approx(full_benchmark(image, text, owner, k))


def test_the_two_readings_differ_and_are_named_apart():
    image, text = pairs(50)
    benchmark = benchmark_recall(image, text, torch.arange(50), ks=(5,))
    assert not set(benchmark) & set(paired_recall(image, text))
    assert benchmark["text_retrieval_recall@5"] == pytest.approx(paired_recall(image, text)["image_to_text_R@5"])


def test_a_collapsed_model_gets_chance_not_a_perfect_score():
    same = torch.ones(20, 4)
    assert paired_recall(same, same)["image_to_text_R@1"] == 1 / 20


def test_counts_that_do_not_fit_are_refused():
    image, text = pairs(4)
    with pytest.raises(ValueError, match="one caption an image"):
        paired_recall(image, text[:3])
    with pytest.raises(ValueError, match="image numbers"):
        benchmark_recall(image, text, torch.arange(3))
    with pytest.raises(ValueError, match="1 of 4 images have no caption, first image 2"):
        benchmark_recall(image, text, torch.tensor([0, 1, 3, 3]))

"""Su, "Transformer升级之路：12、无限外推的ReRoPE？" (7 August 2023, kexue.fm/archives/9708) and "13、逆用Leaky ReRoPE"
(14 August 2023, kexue.fm/archives/9728).

Rows with "log n" were trained with the factor ln n / ln 512 on the logits; those with "log n*" have it in evaluation
alone, as our `logit_scaling: log_n`. The columns are the pages' own: the training length, and texts of 4096 tokens that
repeat themselves and that do not.
"""

from megatron_coca.evaluation.report.published.records import PublishedTable, Use, row

SOURCE = "Su's pages on ReRoPE, kexue.fm/archives/9708 and 9728"

ACCURACY = PublishedTable(
    "Next-token accuracy in percent",
    SOURCE,
    "next-token accuracy",
    "GAU language model of 100M parameters, trained at 512",
    512,
    ("512 (trained)", "4096, repeated", "4096, not repeated"),
    (
        row("Baseline", "49.41 24.17 23.16", Use("rotary")),
        row("Baseline, log n", "49.40 24.60 24.02", Use("rotary", logits="log_n_trained")),
        row("PI-RoPE", "49.41 15.04 13.54", Use("rotary", "linear")),
        row("PI-RoPE, log n", "49.40 14.99 16.51", Use("rotary", "linear", logits="log_n_trained")),
        row("NTK-RoPE-fixed", "49.41 51.86 39.61", Use("rotary", "ntk_fixed")),
        row("NTK-RoPE-fixed, log n*", "49.41 55.94 41.11", Use("rotary", "ntk_fixed", logits="log_n")),
        row("NTK-RoPE-fixed, log n", "49.40 62.85 44.14", Use("rotary", "ntk_fixed", logits="log_n_trained")),
        row("NTK-RoPE-mixed", "49.41 53.09 40.12", Use("rotary", "ntk_mixed")),
        row("NTK-RoPE-mixed, log n*", "49.41 59.11 42.38", Use("rotary", "ntk_mixed", logits="log_n")),
        row("NTK-RoPE-mixed, log n", "49.40 68.91 45.41", Use("rotary", "ntk_mixed", logits="log_n_trained")),
        row("ReRoPE-w256", "49.41 77.90 48.48", Use("rotary", positions="rerope", window=0.5)),
        row("ReRoPE-w256, log n*", "49.41 82.40 48.85", Use("rotary", positions="rerope", window=0.5, logits="log_n")),
        row(
            "ReRoPE-w256, log n",
            "49.40 85.12 49.07",
            Use("rotary", positions="rerope", window=0.5, logits="log_n_trained"),
        ),
        row("ReRoPE-w128", "49.41 76.11 47.82", Use("rotary", positions="rerope", window=0.25)),
        row("ReRoPE-w128, log n*", "49.41 82.28 48.78", Use("rotary", positions="rerope", window=0.25, logits="log_n")),
        row(
            "ReRoPE-w128, log n",
            "49.40 85.47 48.87",
            Use("rotary", positions="rerope", window=0.25, logits="log_n_trained"),
        ),
        row(
            "Leaky ReRoPE-w256-k16, log n",
            "49.40 83.59 48.87",
            Use("rotary", positions="leaky_rerope", window=0.5, logits="log_n_trained"),
        ),
        row(
            "Leaky ReRoPE-w128-k16, log n",
            "49.40 85.15 49.10",
            Use("rotary", positions="leaky_rerope", window=0.25, logits="log_n_trained"),
        ),
        row(
            "InvLeaky ReRoPE-w128, log n",
            "49.38 82.25 48.32",
            Use("rotary", positions="inv_leaky_rerope", window=0.25, logits="log_n_trained"),
        ),
        row("InvLeaky ReRoPE-w128-b8, log n", "49.62 81.15 48.85"),
    ),
)

LOSS = PublishedTable(
    "Loss of LLaMA-2-13B",
    SOURCE,
    "loss",
    "LLaMA-2-13B, trained at 4096, nats per token",
    4096,
    (4096, 8192, 16384),
    (
        row("RoPE", "1.4967 8.8615 –", Use("rotary")),
        row("NTK-RoPE", "1.6081 1.5417 1.5163", Use("rotary", "ntk")),
        row("ReRoPE", "1.4996 1.4267 1.4001", Use("rotary", positions="rerope")),
    ),
)

TABLES = (ACCURACY, LOSS)

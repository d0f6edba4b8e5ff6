"""Train a GPT-2 on the bytes of the Python standard library's sources, data-parallel, with transformers' Trainer.

Run it with: torchrun --standalone --nproc_per_node 2 THIS_FILE --output out/bytes
"""

import argparse
import math

import corpus
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

CONTEXT = 64


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", default="allreduce", help="a commlib algorithm (plain DDP has no choice)")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8, help="windows per rank and step")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--every", type=int, default=50, help="steps between validations and checkpoints")
    parser.add_argument("--output", default="out/transformers-bytes", help="folder of checkpoints and the model")
    parser.add_argument("--resume", action="store_true", help="resume from the last checkpoint there")
    return parser.parse_args()


class Windows(torch.utils.data.Dataset):
    """Consecutive windows of a text; each is its own target, because models of transformers shift it."""

    def __init__(self, text: Tensor, count: int) -> None:
        self.text = text
        self.count = min(count, len(text) // CONTEXT)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, idx: int) -> dict[str, Tensor]:
        window = self.text[idx * CONTEXT : (idx + 1) * CONTEXT].long()
        return {"input_ids": window, "labels": window}


def main() -> None:
    args = parse_args()
    train_text, validation_text = corpus.standard_library()
    torch.manual_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    size = {"vocab_size": 256, "n_positions": CONTEXT, "n_embd": 64, "n_layer": 2, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(**size, **ends))
    trainer = Trainer(
        model=model,
        train_dataset=Windows(train_text, len(train_text)),
        eval_dataset=Windows(validation_text, 64),
        args=TrainingArguments(
            output_dir=args.output,
            max_steps=args.steps,
            per_device_train_batch_size=args.batch,
            learning_rate=args.lr,
            logging_steps=args.every,
            eval_strategy="steps",
            save_strategy="steps",
            eval_steps=args.every,
            save_steps=args.every,
            save_total_limit=2,
            report_to="none",
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
        ),
    )
    trainer.train(resume_from_checkpoint=args.resume)
    trainer.save_model()
    bits = trainer.evaluate()["eval_loss"] / math.log(2)
    if trainer.is_world_process_zero():
        prompt = torch.tensor([list(b"import ")], device=trainer.model.device)
        text = trainer.model.generate(prompt, max_new_tokens=24, do_sample=False)[0].tolist()
        print(f"validation {bits:.3f} bits per byte; the model continues: {bytes(text)!r}", flush=True)


if __name__ == "__main__":
    main()

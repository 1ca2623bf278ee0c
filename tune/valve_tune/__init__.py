"""LoRA finetuning as offline work: training cut into tiles that may stop between any two and lose nothing."""

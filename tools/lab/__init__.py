"""Experiments on the policies of granted time and finetuning, beside the replay lab."""

"""PyTorch: capture a training step, measure its operators, plan it, run the plan. Imported when first used."""

"""The zoo: dense parts of public recommendation models, converted and not, in three modes."""

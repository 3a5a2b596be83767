"""Train one real model under each strategy and put what it cost into one table."""

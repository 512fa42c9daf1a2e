"""From documents to shards: parallel, restartable, without duplicates, in bounded memory."""

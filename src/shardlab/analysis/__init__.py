"""Reading what runs left behind. Never imports training: a report needs no torch."""

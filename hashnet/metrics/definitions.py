"""What each number of a report means, in one sentence each; shown beside the numbers."""

from __future__ import annotations

DEFINITIONS = {
    "map": (
        "Mean over all queries of AP@k = (sum over ranks r <= k of precision@r * rel_r) / relevant items "
        "inside the top k. A query without a hit counts 0. Items at equal distance are ordered by a seeded "
        "hash of their row id, in a comparison of their position among the database rows. Comparable with "
        "the hashing papers."
    ),
    "map_retrieved_hits_only": (
        "The same AP@k, averaged only over queries with at least one hit in the top k."
    ),
    "map_relevant": (
        "Mean over all queries of the same sum / min(k, relevant items in the database); a query without a "
        "hit counts 0. Information retrieval, TREC style."
    ),
    "map_tie_aware": (
        "The 'relevant' AP@k averaged exactly over every order of items at equal distance (McSherry and "
        "Najork, 2008); it depends on no tie-breaking."
    ),
    "map_relevant_last": (
        "The 'relevant' MAP if every tie were broken against us: the lower bound over tie orders."
    ),
    "map_relevant_first": (
        "The 'relevant' MAP if every tie were broken in our favour: the upper bound over tie orders."
    ),
    "queries_without_hit": "Queries with no relevant item in their top k.",
    "queries_without_relevant": (
        "Queries with no relevant item in the whole database; they count 0 in MAP, precision and recall."
    ),
    "chance": "Mean fraction of the database that is relevant to a query: the precision of a random order.",
    "precision_at": "Precision at N: relevant items among the N nearest / N, mean over queries.",
    "recall_at": (
        "Recall at N: relevant items among the N nearest / relevant items in the database, mean over queries."
    ),
    "precision_within": (
        "Precision within Hamming radius r: relevant items at distance <= r / items at distance <= r, mean "
        "over queries; a query with an empty ball counts 0."
    ),
    "recall_within": (
        "Recall within Hamming radius r: relevant items at distance <= r / relevant items in the database, "
        "mean over queries."
    ),
    "empty_within": "Fraction of queries with no item at all at distance <= r.",
    "per_class": "MAP over the queries that carry the class; a query with several labels counts for each.",
    "interval": (
        "95 % percentile bootstrap of the mean over queries (1,000 resamples, seeded): how much the choice "
        "of queries matters. It says nothing about other training seeds."
    ),
}

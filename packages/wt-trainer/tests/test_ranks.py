"""How the trainer ranks that call together find each other."""

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from wt_common import ConfigurationError
from wt_trainer.init_infos import SessionFields
from wt_trainer.ranks import TrainerRanks

SECRET = {"session_secret": "ab" * 32, "master_address": "127.0.0.1", "master_port": 4711}


@pytest.fixture
def groups():
    """Makes a gloo group of this process's threads, one member each."""

    def make(size):
        store, made = dist.HashStore(), [None] * size

        def join(rank):
            backend = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=20))
            group = dist.ProcessGroup(store, rank, size)
            group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
            made[rank] = group

        threads = [threading.Thread(target=join, args=(rank,), daemon=True) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert None not in made
        return made

    return make


def test_without_group_or_secret_there_is_one_rank():
    """A trainer of which nothing is known has one rank, which shares with itself."""
    ranks = TrainerRanks(SessionFields(), 0)
    assert (ranks.count, ranks.group) == (1, None)
    assert ranks.share({"port": 1}) == {"port": 1}
    assert ranks.share(None) == {}


@pytest.mark.parametrize("rank", [1, -1])
def test_rank_without_a_way_to_the_sender_is_refused(rank):
    """A rank above 0 that cannot find the sender is refused, and told by what it could."""
    with pytest.raises(ConfigurationError, match=f"got {rank}. A rank above 0 finds the sender over") as caught:
        TrainerRanks(SessionFields(), rank)
    assert (caught.value.rank, caught.value.phase) == (rank, "init")


def test_number_of_ranks_alone_is_no_way_to_the_sender():
    """Knowing how many there are does not tell where the sender is."""
    with pytest.raises(ConfigurationError, match="finds the sender over"):
        TrainerRanks(SessionFields(num_trainer_ranks=2), 1)


def test_ranks_with_a_secret_need_no_group():
    """With a secret, address and port, ranks are counted by what they were told."""
    for rank in (0, 1, 2):
        ranks = TrainerRanks(SessionFields(num_trainer_ranks=3, **SECRET), rank)
        assert (ranks.count, ranks.group) == (3, None)
    with pytest.raises(ConfigurationError, match=r"expected 0 <= rank < 3 \(the trainer ranks\), got 3"):
        TrainerRanks(SessionFields(num_trainer_ranks=3, **SECRET), 3)


def test_group_numbers_the_ranks(groups):
    """In a group, count and rank are the group's; a rank that says otherwise is refused with both numbers."""
    (group,) = groups(1)
    assert TrainerRanks(SessionFields(process_group=group), 0).count == 1
    with pytest.raises(ConfigurationError, match="has this process as rank 0, the init info as rank 1"):
        TrainerRanks(SessionFields(process_group=group), 1)


def test_group_shares_what_rank_0_says(groups, in_thread):
    """What rank 0 passes is what every rank of the group gets, as plain JSON, of any length."""
    members = [TrainerRanks(SessionFields(process_group=group), rank) for rank, group in enumerate(groups(3))]
    payload = {"address": "127.0.0.1", "port": 4711, "secret": "ab" * 500, "name": "é"}
    sharing = [in_thread(lambda ranks=ranks: ranks.share(payload if ranks.rank == 0 else None)) for ranks in members]
    assert [each.value(30) for each in sharing] == [payload] * 3


def test_default_group_of_another_purpose_is_left_alone(groups):
    """A trainer that says that it has one rank, or has a secret, does not ask a default group; others do."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert TrainerRanks(SessionFields(), 0).group is dist.group.WORLD
        assert TrainerRanks(SessionFields(num_trainer_ranks=1), 0).group is None
        assert TrainerRanks(SessionFields(num_trainer_ranks=2, **SECRET), 1).group is None
    finally:
        dist.destroy_process_group()

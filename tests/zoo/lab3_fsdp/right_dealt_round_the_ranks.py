"""Deals the entries of a unit round the ranks; a unit may have fewer entries than there are ranks.

loses: nothing
"""


# %% replaces="task3_fsdp"
class Unit:
    """A hand of cards, and the deck when it is on the table."""

    def __init__(self, module: nn.Module):
        self.players, me = dist.get_world_size(), dist.get_rank()
        self.params = list(module.parameters())
        lengths = [p.numel() for p in self.params]
        self.rounds = (sum(lengths) + self.players - 1) // self.players
        some = self.params[0]
        self.deck = torch.zeros(self.rounds, self.players, dtype=some.dtype, device=some.device)
        cards = self.deck.view(-1)[: sum(lengths)].split(lengths)
        with torch.no_grad():
            for p, place in zip(self.params, cards, strict=True):
                place.copy_(p.reshape(-1))
                p.data = place.view(p.shape)
        self.shard = nn.Parameter(self.deck[:, me].clone())
        self.deck_bytes = self.deck.untyped_storage().nbytes()
        self.coming: tuple | None = None
        self.on_table = True
        self.waiting_for = set(range(len(self.params)))
        self.clear()

    def clear(self) -> None:
        self.deck.untyped_storage().resize_(0)
        self.on_table = False

    def call(self) -> None:
        """Asks for all hands."""
        if not self.on_table and self.coming is None:
            hand = self.shard.detach()
            hands = hand.new_empty(self.players * self.rounds)
            self.coming = all_gather_single(hands, hand, async_op=True), hands

    def lay_out(self) -> None:
        """Puts the deck on the table, in order."""
        self.call()
        if self.coming is not None:
            work, hands = self.coming
            self.coming = None
            work.wait()
            self.deck.untyped_storage().resize_(self.deck_bytes)
            self.deck.copy_(hands.view(self.players, self.rounds).t())
            self.on_table = True

    def deal_gradients(self) -> None:
        """Adds this rank's part of the mean to the hand's gradient."""
        size = self.players * self.rounds
        ordered = torch.cat([p.grad.reshape(-1) for p in self.params])
        for p in self.params:
            p.grad = None
        ordered = nn.functional.pad(ordered, (0, size - ordered.numel())) / self.players
        mine = torch.empty_like(self.shard)
        dealt = ordered.view(self.rounds, self.players).t().contiguous().view(-1)
        reduce_scatter_single(mine, dealt)
        if self.shard.grad is None:
            self.shard.grad = torch.zeros_like(self.shard)
        self.shard.grad += mine


class FSDP(nn.Module):
    """Fully sharded data parallelism: a unit is whole only while it computes."""

    def __init__(self, model: nn.Module, units: list[nn.Module]):
        super().__init__()
        self.add_module("model", model)
        self.decks = [Unit(module) for module in units]
        for module, deck, before, behind in zip(
            units, self.decks, [None, *self.decks[:-1]], [*self.decks[1:], None], strict=True
        ):
            self._attach(module, deck, before, behind)

    @staticmethod
    def _attach(module: nn.Module, deck: Unit, before: Unit | None, behind: Unit | None) -> None:
        def enter(module, args):
            deck.lay_out()
            if behind is not None:
                behind.call()

        def enter_backward(gradient):
            deck.lay_out()
            if before is not None:
                before.call()

        def leave(module, args, output):
            deck.clear()
            if output.requires_grad:
                output.register_hook(enter_backward)

        def got(number, p):
            deck.waiting_for.discard(number)
            if not deck.waiting_for:
                deck.waiting_for.update(range(len(deck.params)))
                deck.clear()
                deck.deal_gradients()

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)
        for number, p in enumerate(deck.params):
            p.register_post_accumulate_grad_hook(partial(got, number))

    def local_parameters(self) -> list[nn.Parameter]:
        """This rank's shards, for the optimizer."""
        return [deck.shard for deck in self.decks]

    def forward(self, *args):
        """The model's forward pass."""
        return self.model(*args)

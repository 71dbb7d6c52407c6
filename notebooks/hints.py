"""Two hints for each graded exercise: `check(exercise, answer, hint=1)` shows the first one, `hint=2` the second.

The first names the idea to think of, the second the step that is usually missing. Neither is the solution.
"""

HINTS: dict[str, tuple[str, str]] = {
    # --- m1 -----------------------------------------------------------------------------------------------------------
    "m1.off_by_one": (
        "A token gets its keys and values when a forward pass reads it. Which of the tokens that exist after a step "
        "has no pass read yet?",
        "Count what the step has read, and nothing else: the sampled token is among the tokens that the next step "
        "reads, and is counted there.",
    ),
    "m1.detokenizer": (
        "A token is a sequence of bytes, and a character may need several tokens. So decode all ids together, and ask "
        "which end of the text may still change.",
        "Only replacement characters (U+FFFD) at the very end wait for more tokens; those before other text stay. "
        "What waits still belongs to the answer when the request ends, so `tail` must have it.",
    ),
    "m1.output_processor": (
        "While a request runs, the end of its text may be the beginning of a stop string. What must a stream not show "
        "yet?",
        "`held_back` returns how many characters wait, and that may be none. With a negative index, cutting off none "
        "of them leaves an empty text.",
    ),
    "m1.kv_bytes": (
        "Follow one token through the model: each layer keeps two vectors for each of its KV heads.",
        "Two fields are easily confused with others: the heads that are kept are `num_key_value_heads`, and their "
        "size is the config's own `head_dim`.",
    ),
    "m1.top_p_filter": (
        "Put the tokens in order, best first, and look at running sums. Whether a token stays is decided by the "
        "tokens before it.",
        "A token stays if those that are better have not reached `p`: compare the sum before it, not the sum with it. "
        "Then the kept values must return to the order of token ids.",
    ),
    "m1.held_back": (
        "The question is about an end of `text` that is also a beginning of a stop string. How long can such an end "
        "be?",
        "Several ends may fit, and a shorter one would show too much: try the longest first, and no end that is "
        "longer than the text.",
    ),
    # --- m2 -----------------------------------------------------------------------------------------------------------
    "m2.starved_decode": (
        "Neither side may always be first. What does the scheduler have to remember from one step to the next so that "
        "nobody waits twice in a row?",
        "Only the requests that were left out in the step before go ahead of the prompts; all other running requests "
        "stay behind them. None of them may get a second token in the same step.",
    ),
    "m2.admit": (
        "Two limits are used up while requests join: places and tokens. Go through the queue, and keep count of both.",
        "The first prompt that does not fit ends the admission, even if a shorter one behind it would fit. A limit "
        "that is reached exactly is kept.",
    ),
    "m2.padding": (
        "There are two forwards, each a rectangle: count its places, and take away those that hold a token.",
        "The rows of the decode forward are counted from slot 0, whether it is used or not. Compare the used rows "
        "with half of all before you count idle ones.",
    ),
    "m2.slot_manager": (
        "Two questions decide whether there is room: has the request a slot, or is one free? And is a slot long "
        "enough?",
        "A request that has a slot keeps it and gets nothing new from `reserve`; and `release` may be called for a "
        "request that has none.",
    ),
    "m2.shortest_first": (
        "If the queue is always in the right order, taking from its left end needs no change. So where in the queue "
        "does a new request belong?",
        "It stands before the first one that is longer. Requests of equal length must not be passed, and without a "
        "longer one its place is the end.",
    ),
    # --- m3 -----------------------------------------------------------------------------------------------------------
    "m3.freed_block": (
        "A block may be in several tables, and the pool counts them. What does `free` mean while another table still "
        "has the block?",
        "Take one holder away, and make the block available only when no holder is left. A block without a count is "
        "not in use, and that is an error of the caller.",
    ),
    "m3.router": (
        "In float32 both orders give the same numbers, but for the last digit. In which precision is the division "
        "here, and in which one does the model need it?",
        "Divide the float32 probabilities by their float32 sum, and convert the quotients. Nothing else changes.",
    ),
    "m3.expert_layout": (
        "The shape of one tensor may be the same in both layouts. Write down both shapes of both tensors, for a hidden "
        "size of 8 and a width of 4, and for 8 and 8.",
        "Both tensors of a file are in the same layout. If the two shapes together are the transposed ones, transpose "
        "both; otherwise neither.",
    ),
    "m3.slots": (
        "A position has two halves: which block of the request it is in, and which place inside this block.",
        "The block of the request is an index into the table, and the table has the number of the block in memory. "
        "Positions begin at `start`.",
    ),
    "m3.join": (
        "Each piece is an average, and `lse` says how much weight its positions have together. The whole is an "
        "average of the two averages.",
        "Take the larger `lse` away before `exp`, so that no weight is more than 1. Where a weight is 0, leave out "
        "the piece's `out` altogether: 0 times NaN is NaN.",
    ),
    "m3.shared_blocks": (
        "Each block needs a number that the skeleton does not have: how many tables it is in. Every method changes or "
        "reads it.",
        "`append` has three cases: the token is the first of a new block, its block is shared, or its block is the "
        "request's own. Only the second one is a copy, and the old block then has one holder less.",
    ),
    "m3.newest_first": (
        "The order of `running` is the order of admission, and a request may have been admitted twice. Which number "
        "never changes?",
        "The request that arrived last has the largest `request.number`, wherever it stands. The list belongs to the "
        "scheduler: do not change it, not even its order.",
    ),
    # --- m4 -----------------------------------------------------------------------------------------------------------
    "m4.freed_while_mapped": (
        "After this method the request must read the tree's slots, and not its own duplicates. Which table does the "
        "forward pass read?",
        "The row of `req_to_token_pool` still has the old slots: write the tree's into it, from where the request's "
        "own slots begin. What is freed are the slots that the row had before.",
    ),
    "m4.whole_hit": (
        "The next token is sampled from logits, and logits are computed from a token that goes through the model. How "
        "many tokens must be left for that?",
        "The cut must be made before the search, so that whole pages and the locked node agree. A request with "
        "log-probabilities of its prompt needs the logits of every token of it.",
    ),
    "m4.match": (
        "Walk down from the root: at each node the next page of the text chooses the child, and the child's tokens are "
        "compared with the rest.",
        "The two may differ inside a node, also inside a page: count the equal tokens, round down to whole pages, and "
        "go on only if the whole node is equal.",
    ),
    "m4.split": (
        "The running request keeps a reference to `node` itself. So which of the two nodes must be the new object, "
        "the upper or the lower one?",
        "Four things are easily forgotten: the entry in the parent's children, the key of the lower node's first "
        "page, its new parent, and that a lock on the lower node also protects the upper one.",
    ),
    "m4.who_goes_first": (
        "Go through the requests in order of arrival, and keep two lists. A request waits if someone of the first "
        "list will bring it more than it finds now.",
        "What two requests have in common counts in whole pages, and without the last token of the one that would "
        "wait. Sort only at the end, by what the cache has, with a sort that keeps the order of arrival.",
    ),
    "m4.strategy": (
        "Two kinds of leaves are cached: those that were used once and never again, and those that many requests "
        "began with. A rank of one field cannot keep the second and forget it later.",
        "Add a bonus for hits to the time of the last use, and limit it: what was popular in the morning must be able "
        "to go. Try several sizes of the bonus.",
    ),
    # --- m4, tiers ----------------------------------------------------------------------------------------------------
    "m4_tiers.reused": (
        "A copy reads host pages until it is done. Who is the first to need these pages for something else, and what "
        "must they do before?",
        "Keep the copies of each text, all of them: a text may be loaded twice. Wait for them where the text is "
        "evicted, and let no copy change which text that is.",
    ),
    "m4_tiers.layer_wait": (
        "A layer may be read when the loads have brought it. How can the reader know, for this layer alone?",
        "Several loads may be under way, and each may bring a part of what is read: wait for this layer of every "
        "job, and for no layer behind it.",
    ),
    "m4_tiers.names": (
        "The KV of a page depends on all tokens before it. So the name of a page can be made of the name before it "
        "and its own tokens.",
        "Begin the chain with `root`, use a digest of hashlib, and write each token with the same number of bytes: "
        "otherwise 1, 23 and 12, 3 become the same data.",
    ),
    "m4_tiers.victims": (
        "First find out who may be preempted at all, then put them into the order of the rule, then take from the "
        "front until there is room.",
        "There is room only if `need` is less than what is free, not equal to it. If all of them are not enough, "
        "nobody is preempted.",
    ),
    # --- m5 -----------------------------------------------------------------------------------------------------------
    "m5.sampled_piece": (
        "A prompt gives one token, after its last piece. `sample_lens` says how many tokens are sampled for each "
        "request of the step: what should it be for a piece in the middle?",
        "Only one request of the batch can be in pieces, and it may be None. Change its number, at its place in "
        "`self.reqs`, and leave the others, also those with guesses.",
    ),
    "m5.overshoot": (
        "The newest token of a request was sampled and has not been through the model. What is in its slot after a "
        "step with guesses?",
        "The KV there is that of the guess. So a request that ends has KV for one token less than it has tokens: "
        "compare this with what the step has committed.",
    ),
    "m5.starved": (
        "Composing a step needs to know what the step before was: let the composer remember whether it had prompts. "
        "Or put both into one step.",
        "After a step of prompts request the running batch first; if that is None, the memory has no room for it, and "
        "prompts are requested. If both share a step, the prompts get what the decodes leave of the budget.",
    ),
    "m5.fill": (
        "The decodes have their tokens first; what is left of the budget goes to the prompts, in their order.",
        "A prompt that does not fit takes all of the rest, so nothing is left for the next one: and no pair may have "
        "0 tokens.",
    ),
    "m5.lookup": (
        "Try the lengths from the longest to the shortest, and for each of them all places from the beginning. The "
        "first hit is the answer.",
        "The last tokens themselves are no earlier occurrence, but one may overlap with them: the search ends one "
        "place before theirs. And a run is shorter than the text.",
    ),
    "m5.accept": (
        "Go through the guesses in order. The first one that is rejected ends the step, and a token of `own` takes "
        "its place.",
        "A drawn guess is judged by `p`, `q` and `u` alone, never compared with `own`. If all are kept, the row "
        "behind the last guess gives one token more.",
    ),
    "m5.back_off": (
        "Estimate the rate at which a guess is right. With it you can compute, for each number of guesses, the cost of "
        "the step and the tokens that it is expected to bring.",
        "Count a step's guesses up to the first wrong one: the others were not verified. Let old counts lose weight, "
        "and where no guess pays make one now and then, or you never see that the text has changed.",
    ),
    # --- m6, pictures -------------------------------------------------------------------------------------------------
    "m6.swapped": (
        "The tokens of a picture come row by row. From the number of a token you get its row and its column by a "
        "division: by which side?",
        "The quotient and the remainder of a division by the width are the row and the column, in this order. Look "
        "which names the function gives to the two.",
    ),
    "m6.layout": (
        "The axes take turns, pair by pair. What decides whether an axis still gets the pair whose turn it has?",
        "An axis that had its share gives its turn to time and not to the next axis. The turn of a pair depends only "
        "on its number, so the turns go on in the same rhythm to the end.",
    ),
    "m6.content": (
        "The bytes are a row of numbers without rows and columns. What else makes two pictures with the same bytes "
        "different?",
        "Put the grid into the hash too, in a form in which no two grids become the same data: with a separator "
        "between the numbers, or with a fixed number of bytes for each. Use hashlib, not `hash`.",
    ),
    "m6.key": (
        "A content needs the same number whenever it comes, in this prompt and in later calls: `known` is where the "
        "numbers are kept.",
        "A new content gets the next number, and `known` says how many there are already. All ranges of an item get "
        "its number, and the prompt itself must not change.",
    ),
    "m6.rows": (
        "Each range of placeholders overlaps with the piece or not. What are the beginning and the end of the overlap?",
        "The rows of an item are numbered through all of its ranges, so a range outside the piece counts as well. The "
        "first row is the number of rows before this range, plus the distance of the overlap from its beginning.",
    ),
    "m6.piece": (
        "Go through the items in order, and keep what this step has encoded: the tokens spent, and the contents that "
        "cost nothing.",
        "An item is too much only if something was spent before it. It costs the tokens of all its ranges as soon as "
        "the piece touches one, and the piece ends before the first range of the item, which may be before `start`.",
    ),
    "m6.sample_frames": (
        "Find the number of frames first: so many a second for the length of the video, rounded down, and then the "
        "limits. Where the frames are is a second question.",
        "What is in the video limits the number last, after `at_least` and `at_most`. The places are evenly spaced "
        "with the first and the last frame among them: no fixed step.",
    ),
    # --- m6, two engines ----------------------------------------------------------------------------------------------
    "m6_pd.delta": (
        "An answer begins behind everything in the prompt: which is the first position that no token has, on any axis?",
        "The delta is this position minus the number of tokens. Two mistakes are likely: the largest position is that "
        "of the last token only in a text, and `positions` has its tokens along the second axis.",
    ),
    "m6_pd.rooms": (
        "Messages name a room and no attempt. So a late message is harmless if its room cannot be found any more.",
        "Make a new number at each entry, also for a request that had one, and never derive it from how many rooms "
        "there are now. The old room must lose its receiver.",
    ),
    "m6_pd.frames": (
        "Two moments are confused: when the pages are copied into frames, and when the other engine has read the "
        "frames.",
        "`release` is called when the target has read a ticket. `StagedSource` does the right thing in both methods: "
        "what is left to add?",
    ),
    "m6_pd.pages_ready": (
        "A page may be sent when nothing is added to it any more. When is that true of a full page, and when of the "
        "last one?",
        "Before the prompt is computed round down to full pages, afterwards round up. `next_page` may be ahead of "
        "what is computed: then the range is empty.",
    ),
    "m6_pd.bytes_moved": (
        "Count pages, not tokens: those of the prompt, without those that the other side has.",
        "The last page is sent whole, even if it is not full: round the number of pages up.",
    ),
    "m6_pd.receive": (
        "Keep three numbers: the chunks that arrived, the next page that is missing, and the announced number of "
        "chunks, if it is known. Each message changes one of them or ends the transfer.",
        "After each token and chunk ask whether the rest is still possible: the missing pages need at least one "
        "chunk, and no more chunks may follow than pages are missing. A chunk that came before is ignored before "
        "anything else is checked.",
    ),
    "m6_pd.deliver": (
        "What is sent overlaps with what is known, from place `first` on. The overlap must be equal, and what is "
        "behind it is new.",
        "Three cases remain: the sent tokens begin behind the known ones with a gap, they end before the known ones "
        "do, or there are none. Compare only as many tokens as both have.",
    ),
    # --- m6, overlapped steps -----------------------------------------------------------------------------------------
    "m6_overlap.ended": (
        "When a request ends, the step in flight was launched before that was known. What does that step still use, "
        "and until when?",
        "Remember the requests that ended while the step in flight had them. In the next call they come first: their "
        "rows are given back, even without a token in `tokens`, and what was computed for them is dropped.",
    ),
    "m6_overlap.sizes": (
        "The largest step has `most` requests, whatever number that is. Which size must therefore always be there?",
        "Leave out every other size that is not smaller than `most`, the small ones too: with 3 there is no 4, and "
        "with 8 there is no second 8.",
    ),
    "m6_overlap.bucket": (
        "A step that no bucket holds is no error. What does `next` do when nothing is found?",
        "`next` takes a second argument: what it returns in place of an error.",
    ),
    "m6_overlap.pad": (
        "A captured step knows addresses. Which statements in `pad_batch` make a tensor at another address?",
        "Write into rows of the tensors that exist, and remember that they hold what an earlier step left there: the "
        "rows from the last request to the end of the bucket need slot 0 and length 0.",
    ),
    "m6_overlap.futures": (
        "A token is lost because others take its place while its request waits. Which place belongs to one request "
        "for as long as it runs?",
        "Let the placeholder name the row and not the step. The table then has as many places as there are rows, and "
        "row 0 needs a negative number, too.",
    ),
    "m6_overlap.loop": (
        "Keep the step in flight in a variable from round to round: in each round schedule, launch, then book the "
        "step before.",
        "A round may have a batch without a step before it, or a step before without a batch: both must work, and the "
        "loop ends when it has neither. A step that arrived early, because a batch must wait, does not arrive again.",
    ),
    # --- m7 -----------------------------------------------------------------------------------------------------------
    "m7.zombie": (
        "`abort` asks a table whether the request is unfinished. What is in this table at the moment when the reader "
        "leaves?",
        "Look at the order of the two statements in `finally`: one of them removes what the other one looks for.",
    ),
    "m7.half_character": (
        "The engine has a detokenizer already, which holds back half characters and beginnings of stop strings. Which "
        "field of the output has its result?",
        "This text only grows. So a chunk is what came since the last one: count characters that were sent, and not "
        "tokens.",
    ),
    "m7.slow_reader": (
        "Each output has everything so far. How many outputs of a request does a late reader need?",
        "Keep one place for each request, which `put` overwrites. A reader that finds it empty waits for a signal, "
        "and what was taken is not there a second time.",
    ),
    "m7.read_events": (
        "Reads are cut at any byte, and lines are not. Put the bytes together first, then look at whole lines.",
        "Three rules are easily missed: only one space behind the colon goes away, an empty line without data before "
        "it is no event, and what comes after the last line break has not ended.",
    ),
    "m7.quantile": (
        "The rank says how many observations lie below the answer. Find the bucket that contains it, then the place "
        "inside this bucket.",
        "Counts are cumulative, so the observations of a bucket are its count minus the count before, and the rank "
        "inside it is counted from there. The infinite bound and an empty histogram are cases of their own.",
    ),
    # --- m8 -----------------------------------------------------------------------------------------------------------
    "m8.order": (
        "Which of the containers in your function keeps an order that is the same in every process?",
        "The queue itself has an order that all ranks share. Go through it once, and remember which prompts you have "
        "met: to ask a set whether it has something is safe, to iterate over it is not.",
    ),
    "m8.bias": (
        "What every rank returns is added up. What must be in the sum once, although every rank has it?",
        "One rank adds the bias, and the others add nothing. Only rank 0 is there for every number of ranks.",
    ),
    "m8.images": (
        "A collective needs all ranks, also those that have nothing to bring.",
        "Do not return before `all_gather`. An empty dictionary is a value like any other; with no image at all, too, "
        "all ranks come or none does.",
    ),
    "m8.slices": (
        "A stored weight is [outputs, inputs]. Of which of the four are heads the inputs?",
        "With n KV heads and more ranks, cut k and v into n parts: rank r has part r * n // size. The width of a part "
        "is a number of whole heads.",
    ),
    "m8.shares": (
        "Go through the images from the largest to the smallest, and keep count of what each rank has.",
        "Two ties must be decided alike on all ranks: equal images (a stable sort keeps the earlier one first) and "
        "ranks with equally many patches (`list.index` finds the first).",
    ),
}
"""By exercise: the idea, and the step that is usually missing."""
